"""Models of transformers as they are trained: activation checkpointing, dropout, masks, branches of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.stages.planner import Planner
from pipeflow.testing import run_threads
from tests.stages.compared import gradients_of, plain, require_near, seeded, transformers
from tests.stages.families import EVERY, make
from tests.stages.test_transformers import in_stages

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
RECOMPUTED = [
    (name, reentrant, each) for name in ("llama", "bert", "t5") for reentrant in (False, True) for each in SCHEDULES
]
QUICK = [("llama", False, "zb-v"), ("bert", True, "1f1b"), ("t5", False, "dualpipe-v")]


def checkpointed(name: str, reentrant: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose blocks are run again in the backward."""
    made, batch = make(transformers, name)
    module: Any = made
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        module.enable_input_require_grads()
    return module, batch


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "reentrant", "schedule"),
    [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.exhaustive]) for each in RECOMPUTED],
)
def test_activation_checkpointing(name: str, reentrant: bool, schedule: str) -> None:
    """Under every schedule, those that split backwards among them."""

    def rank() -> dict[str, Tensor]:
        module, batch = checkpointed(name, reentrant)
        model = Pipeline.from_module(module, make_schedule(schedule, ranks=2, microbatches=3), batch)
        execute_pipeline(iter([batch]), model)
        return {key: each.grad for key, each in model.named_parameters() if each.grad is not None}

    _, expected = plain(name)
    results = run_threads(rank, 2)
    assert set().union(*results) == set(expected)
    for gradients in results:
        require_near(gradients, expected, 1e-9)


DROPPED = {
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "bert": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
    "t5": {"dropout_rate": 0.3},
    "llama": {"attention_dropout": 0.3},
    "swin": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "drop_path_rate": 0.3},
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_draws_what_the_whole_module_draws(name: str) -> None:
    """Stages that run one after the other draw the same numbers as the module does."""
    family = EVERY[name]
    module, batch = family._replace(sizes={**family.sizes, **DROPPED[name]}).make(transformers)
    seeded()
    module(**batch).loss.backward()
    expected = gradients_of(module)
    seeded()
    in_stages(module, batch, 1, 2 if name == "swin" else 6 if name == "t5" else 4).loss.backward()
    require_near(gradients_of(module), expected, 1e-9)


LAYERDROP = {
    "opt": {"layerdrop": 0.5},
    "whisper": {"encoder_layerdrop": 0.5},
    "bart": {"decoder_layerdrop": 0.5},
    "wav2vec2": {"layerdrop": 0.5},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYERDROP)
def test_dropped_layers_are_refused(name: str) -> None:
    family = EVERY[name]
    module, batch = family._replace(sizes={**family.sizes, **LAYERDROP[name]}).make(transformers)
    with pytest.raises(UsageError, match=r"chooses by a random number which modules it calls \(LayerDrop"):
        Planner(module, 2).plan(batch)
    assert len(Planner(module.eval(), 2).plan(batch).stages) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_all_hidden_states_are_sent(name: str) -> None:
    """They are collected by hooks, and so are there for a criterion of the user's."""
    family = EVERY[name]
    module, batch = family._replace(sizes={**family.sizes, "output_hidden_states": True}).make(transformers)
    expected = module(**batch).hidden_states
    found = in_stages(module, batch, 2, 4).hidden_states
    assert len(found) == len(expected) == 5
    assert all(torch.allclose(mine, its, rtol=1e-12) for mine, its in zip(found, expected, strict=True))
