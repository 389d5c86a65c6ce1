"""LoRA by peft through pipelines: adapters alone are trained, and what is saved of them is read by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeflow.huggingface
from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.testing import run_threads
from tests.stages.families import make
from tests.stages.family import randomise

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
peft = pytest.importorskip("peft", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"], "bert": ["query", "value"]}
CAUSAL = [("llama", "1f1b"), ("llama", "zb-v"), ("gpt2", "1f1b"), ("t5", "1f1b"), ("bert", "interleaved-1f1b")]


def adapted(name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model with adapters all of whose weights are random."""
    module, batch = make(transformers, name)
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=TARGETS[name], **options)
    made = peft.get_peft_model(module, config).double()
    randomise(made)
    return made, batch


def train(model: Any, step: Any) -> list[float]:
    """Three steps of Adam on what wants a gradient."""
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
    return losses


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "schedule"), CAUSAL)
def test_adapters_are_trained_and_nothing_else(name: str, schedule: str) -> None:
    module, batch = adapted(name)

    def serial() -> float:
        loss = module(**batch).loss
        loss.backward()
        return float(loss)

    losses = train(module, serial)

    def rank() -> tuple[list[float], dict[str, Tensor], set[str]]:
        made, batch = adapted(name)
        model = Pipeline.from_module(made, make_schedule(schedule, ranks=2, microbatches=3), batch)

        def step() -> float:
            loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
            assert loss is not None
            return loss.item()

        found = train(model, step)
        named = dict(model.named_parameters())
        return (
            found,
            {key: each.detach() for key, each in named.items()},
            {k for k in named if named[k].grad is not None},
        )

    results = run_threads(rank, 2)
    expected = dict(module.named_parameters())
    for found, named, trained in results:
        assert found == pytest.approx(losses, rel=1e-6)
        assert trained == {key for key in named if "lora_" in key}
        assert all(torch.allclose(each, expected[key], rtol=1e-6, atol=1e-9) for key, each in named.items())
    assert set().union(*(named for _, named, _ in results)) == set(expected)


@pytest.mark.exhaustive
def test_a_saved_adapter_is_read_by_peft(tmp_path: Path) -> None:
    module, batch = adapted("llama", task_type="CAUSAL_LM")

    def serial() -> float:
        loss = module(**batch).loss
        loss.backward()
        return float(loss)

    train(module, serial)

    def rank() -> None:
        made, batch = adapted("llama", task_type="CAUSAL_LM")
        model = Pipeline.from_module(made, make_schedule("1f1b", ranks=2, microbatches=3), batch)
        train(model, lambda: execute_pipeline(iter([batch]), model))
        pipeflow.huggingface.save_pretrained(model, tmp_path)

    run_threads(rank, 2)
    loaded = peft.PeftModel.from_pretrained(make(transformers, "llama")[0], tmp_path).double()
    assert sorted(each.name for each in tmp_path.glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    own = dict(module.named_parameters())
    assert all(torch.allclose(each, own[key], rtol=1e-6) for key, each in loaded.named_parameters() if "lora_" in key)
    with torch.no_grad():
        expected = module.eval()
        for key, each in expected.named_parameters():
            if "lora_" not in key:
                each.copy_(loaded.get_parameter(key))
        assert torch.allclose(loaded.eval()(**inputs).logits, expected(**inputs).logits, rtol=1e-6)
