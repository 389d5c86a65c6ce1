"""A GPT with experts trains over ranks as in one process: losses, norms, every gradient, every weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeflow import UsageError, load_checkpoint, save_checkpoint
from pipeflow.models import GPTLMLoss, GPTStage, build_stage
from pipeflow.testing import run_threads
from tests.huggingface.over_experts import Part, Trained, parts_of, require_trained
from tests.training.over_context import (
    LAYERS,
    Gpt,
    adamw,
    livened,
    loop_in_one_process,
    loop_on_a_rank,
    pipeline_of,
)


@dataclass(frozen=True)
class Mixture(Gpt):
    pipeline: int = 2
    samples: tuple[int, ...] = (3, 5)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "experts": 4, "top_k": 2}


@cache
def expected(work: Mixture) -> Trained:
    model = build_stage(0, LAYERS, LAYERS, first=True, last=True, **work.options)
    livened(model)
    losses, norms = loop_in_one_process(work, model, GPTLMLoss(), adamw(model.parameters()))
    pieces = {
        name: [Part((0,) * each.dim(), each.detach().numpy(), None if each.grad is None else each.grad.numpy())]
        for name, each in model.named_parameters(remove_duplicate=False)
    }
    return Trained(losses, norms, pieces)


def train(work: Mixture, folder: str = "", first: int = 0) -> Trained:
    """On one rank, from step `first` on, which a checkpoint in `folder` has; the end is saved there."""
    model = pipeline_of(work)
    optimizer = adamw(model.parameters())
    if first:
        load_checkpoint(folder, model, optimizer)
    losses, norms = loop_on_a_rank(work, model, optimizer, first)
    if folder and not first:
        save_checkpoint(folder, model, optimizer)
    return Trained(losses, norms, parts_of(model))


CASES: dict[str, tuple[Mixture, dict[str, Any]]] = {
    "expert ranks": (Mixture(), {"experts": 2}),
    "tensor ranks": (Mixture(pipeline=1, checkpoint=True), {"experts": 2, "tensor": 2}),
    "replicas": (Mixture("zb-v"), {}),
    "context ranks": (Mixture(pipeline=1), {"experts": 2, "context": 2}),
    "slices": (Mixture(slices=3), {"experts": 2}),
}


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_layouts(case: str) -> None:
    work, sizes = CASES[case]
    ranks = work.pipeline * len(work.samples) * sizes.get("tensor", 1) * sizes.get("context", 1)
    results = run_threads(train, ranks, work, data=len(work.samples), **sizes)
    require_trained(results, expected(work))
    whole = expected(work).pieces["blocks.0.mixture.experts.wide"][0].weight
    parts = [part for result in results for part in result.pieces.get("blocks.0.mixture.experts.wide", ())]
    assert parts
    assert all(len(part.weight) * sizes.get("experts", 1) == len(whole) for part in parts)


@pytest.mark.slow
def test_a_checkpoint_loads_under_other_expert_ranks(tmp_path: Path) -> None:
    work, folder = Mixture(pipeline=1), str(tmp_path / "saved")
    run_threads(train, 2, Mixture(pipeline=1, steps=2), folder, data=2, experts=2)
    require_trained(run_threads(train, 2, work, folder, 2, data=2), expected(work), 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"top_k": 5}, "top_k must be from 1 to the number of experts, 4, got 5"),
        ({"sequence_parallel": True}, "a GPT with experts needs all tokens and features on each tensor rank"),
    ],
)
def test_what_a_mixture_is_not(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        GPTStage(1, 16, 4, 13, experts=4, **options)
