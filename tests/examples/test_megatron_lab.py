"""The Megatron lab: its step, its losses, and its run from the command line."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch

import megatron_lab.lab
import megatron_lab.megatron
import megatron_lab.samples
from pipeflow.parallel.context import current_context
from pipeflow.testing import run_threads
from tests.examples.conftest import EXAMPLES
from tests.scripts import run_ranks

SEQUENCE, WORDS = 16, 20


def small(chunks: int) -> Any:
    config = megatron_lab.megatron.TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=2, pipeline_dtype=torch.float64
    )
    stages = megatron_lab.megatron.build_stages(config, WORDS, SEQUENCE, chunks)
    models = [megatron_lab.megatron.GPTModel(config, WORDS, SEQUENCE, stage=stage) for stage in stages]
    return models[0] if chunks == 1 else models


def batches() -> Any:
    config = megatron_lab.samples.GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE,
        tokenizer=megatron_lab.samples.NullTokenizer(vocab_size=WORDS - 1),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    return iter(torch.utils.data.DataLoader(megatron_lab.samples.MockGPTDataset(config, 24), batch_size=4))


def logged_and_gradient(chunks: int) -> tuple[list[float], dict[str, float]]:
    model, step = small(chunks), megatron_lab.megatron.get_forward_backward_func()
    logged = step(
        forward_step_func=megatron_lab.lab.forward_step_func,
        data_iterator=batches(),
        model=model,
        num_microbatches=4,
        seq_length=SEQUENCE,
        micro_batch_size=4,
    )
    models = model if chunks > 1 else [model]
    gradients = {
        name: parameter.grad for each in models for name, parameter in each.stage.named_parameters() if "wide" in name
    }
    return [float(values["lm loss"]) for values in logged], gradients


@pytest.mark.parametrize(("ranks", "tensor", "chunks"), [(2, 2, 1), (2, 1, 1), (2, 1, 2), (4, 2, 1)])
def test_a_step_is_the_same_under_every_layout(ranks: int, tensor: int, chunks: int) -> None:
    """No pipeline, 1f1b and interleaved-1f1b: what is logged, a microbatch at a time, and the gradients."""
    [(losses, gradients)] = run_threads(logged_and_gradient, 1, 1)
    assert len(losses) == 4
    found = run_threads(logged_and_gradient, ranks, chunks, tensor=tensor)
    assert found[-1][0] == pytest.approx(losses, rel=1e-12)
    for _, parts in found:
        for name, part in parts.items():
            whole = gradients[name]
            assert any(
                torch.allclose(part, piece, rtol=1e-9, atol=1e-14)
                for piece in whole.chunk(whole.shape[0] // part.shape[0])
            ), name


def test_the_model_gives_each_tokens_loss() -> None:
    def compute() -> None:
        model, sample = small(1), next(batches())
        given = [sample[name] for name in ("tokens", "position_ids", "attention_mask")]
        losses = model(*given, labels=sample["labels"])
        assert losses.shape == (4, SEQUENCE)
        logits = model(*given)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sample["labels"].flatten())
        torch.testing.assert_close(losses.mean(), expected)

    run_threads(compute, 1)


def test_masked_tokens_do_not_move_the_loss() -> None:
    mask, losses = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 3.0, 100.0]])

    class Known(torch.nn.Module):
        def forward(self, *_: Any, **__: Any) -> Any:
            return losses

    names = ("tokens", "position_ids", "attention_mask", "labels")
    sample = {**dict.fromkeys(names, torch.zeros(1, 3)), "loss_mask": mask}
    found, loss_func = megatron_lab.lab.forward_step_func(iter([sample]), Known())
    loss, logged = loss_func(found)
    assert float(loss) == float(logged["lm loss"]) == 2.0


def test_ranks_of_a_replica_read_the_same() -> None:
    def first() -> tuple[int, Any]:
        context = current_context()
        return context.data_rank, next(megatron_lab.lab.get_train_data_iterator(context, tiny=True))["tokens"]

    (_, one), (_, same), (replica, other), _ = run_threads(first, 4, tensor=2, data=2)
    assert one.equal(same)
    assert replica == 1
    assert not one.equal(other)


def test_the_lab_runs(tmp_path: Any) -> None:
    options = ("--tiny", "--steps", "3", "--checkpoint", str(tmp_path / "saved"))
    printed = run_ranks(EXAMPLES / "megatron_lab" / "lab.py", *options, ranks=2)
    losses = [float(loss) for loss in re.findall(r"lm loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert all(later < sooner for sooner, later in pairwise(losses))
    assert printed.endswith("loaded: every weight is what was saved\n")
    assert (tmp_path / "saved").is_dir()
