"""Training under any layout is training in one process: losses, norms, every gradient, every weight."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from pipeflow import Schedule, make_schedule
from pipeflow.testing import run_processes, run_threads
from tests.training.hybrid import Trained, Work, require_trained, train, train_in_one_piece

LAYOUTS = [
    pytest.param(
        (pipeline, tensor, data),
        id=f"{pipeline}x{tensor}x{data}",
        marks=[] if (pipeline, tensor, data) == (2, 2, 2) else [pytest.mark.exhaustive],
    )
    for pipeline in (1, 2)
    for tensor in (1, 2, 4)
    for data in (1, 2)
]
SCHEDULES = {"1f1b": {}, "interleaved-1f1b": {"chunks": 2}, "zb-v": {}}
WORKS = {
    "AdamW": Work(),
    "SGD": Work(optimizer=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9}),
    "sequence parallel": Work(sequence_parallel=True),
    "checkpointing": Work(checkpointing=True, sequence_parallel=True),
    "accumulation": Work(accumulation=2),
    "clipping": Work(max_norm=0.5, sequence_parallel=True, accumulation=2),
}


def schedule_of(name: str, pipeline: int) -> Schedule:
    return make_schedule(name, ranks=pipeline, microbatches=3, **SCHEDULES[name])


@cache
def expected(kind: str, samples: tuple[int, ...]) -> Trained:
    return train_in_one_piece(replace(WORKS[kind], samples=samples))


def run(runner: Any, kind: str, name: str, layout: tuple[int, int, int]) -> None:
    pipeline, tensor, data = layout
    samples = (4, 6)[:data]
    work = replace(WORKS[kind], samples=samples)
    results = runner(train, pipeline * tensor * data, work, schedule_of(name, pipeline), tensor=tensor, data=data)
    require_trained(results, expected(kind, samples))


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", WORKS)
def test_threads(kind: str, name: str, layout: tuple[int, int, int]) -> None:
    run(run_threads, kind, name, layout)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["clipping", "checkpointing"])
@pytest.mark.slow
def test_gloo(kind: str) -> None:
    run(run_processes, kind, "zb-v", (2, 2, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_copies_of_a_stage_whose_gradients_are_parts(name: str) -> None:
    work = replace(WORKS["clipping"], samples=(4, 6))
    schedule = make_schedule(name, ranks=2, microbatches=4)
    results = run_threads(train, 8, work, schedule, tensor=2, data=2)
    require_trained(results, expected("clipping", (4, 6)))
