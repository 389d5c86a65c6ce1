"""What the ranks of these tests do: build a pipeline of a tiny model, run steps, and hand back plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy
import pytest
from torch import Tensor

from pipeflow import Action, Kind, Pair, Pipeline, Placement, Schedule, execute_pipeline, make_schedule, verify
from pipeflow.core.action import Entry
from pipeflow.engine.parallel.context import current_context
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.testing.models import TinyModel
from tests.families import accepts

Batch = tuple[Any, Any]
Gradients = dict[str, numpy.ndarray]


@dataclass(frozen=True)
class Stepped:
    """What a rank has after some steps."""

    losses: list[float | None] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)


def variants(max_ranks: int = 4, max_chunks: int = 3) -> list[tuple[str, int, int]]:
    """Every schedule of the registry, by (name, ranks, chunks)."""
    return [
        (name, ranks, chunks)
        for name in SCHEDULES
        for ranks in range(1, max_ranks + 1)
        if accepts(name, ranks)
        for chunks in range(1, (max_chunks if "chunks" in options_of(name) else 1) + 1)
    ]


def each_once(variants: list[tuple[str, int, int]]) -> list[Any]:
    """The variants as parameters of a test: each schedule's largest one, and the others for the exhaustive tests."""
    return [
        pytest.param(variant, id=str(variant), marks=[] if variant in largest(variants) else [pytest.mark.exhaustive])
        for variant in variants
    ]


def largest(variants: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Each schedule's largest one."""
    return list({variant[0]: variant for variant in variants}.values())


def schedule_of(variant: tuple[str, int, int], microbatches: int) -> Schedule:
    name, ranks, chunks = variant
    options = {"chunks": chunks} if "chunks" in options_of(name) else {}
    return make_schedule(name, ranks=ranks, microbatches=microbatches, **options)


def build(model: TinyModel, schedule: Schedule, **options: Any) -> Pipeline:
    """This rank's Pipeline."""
    chunks = model.chunks(schedule, current_context().pipeline_rank)
    model.tie(chunks, schedule)
    return Pipeline(chunks, schedule, criterion=model.criterion, **options)


def gradients_of(pipeline: Pipeline) -> Gradients:
    """This rank's gradients, by their name in the whole model."""
    named = {name.split(".", 2)[2]: parameter.grad for name, parameter in pipeline.named_parameters()}
    return {name: plain(gradient) for name, gradient in named.items() if gradient is not None}


def plain(value: Any) -> Any:
    """Tensors as arrays, which travel between processes."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value


def run_steps(
    model: TinyModel, schedule: Schedule, batches: list[Batch], *, return_outputs: bool = False, **options: Any
) -> Stepped:
    """A training step on each batch, without zero_grad between."""
    pipeline = build(model, schedule, **options)
    steps = [execute_pipeline(iter([batch]), pipeline, return_outputs=return_outputs) for batch in batches]
    losses = [None if step.loss is None else step.loss.item() for step in steps]
    return Stepped(losses, [plain(step.outputs) for step in steps], gradients_of(pipeline))


def require_near(gradients: Gradients, expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Every gradient there is deviates by less than `tolerance` of the largest entry of the expected one."""
    for name, gradient in gradients.items():
        wanted = expected[name].numpy()
        error = float(abs(gradient - wanted).max())
        assert error <= tolerance * float(abs(wanted).max()), f"{name}: {error} off"


def require_step(results: list[Stepped], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """The ranks together have the loss and every gradient of the plain model."""
    loss, gradients = expected
    told = [result.losses[-1] for result in results if result.losses[-1] is not None]
    assert len(told) in (1, 2)  # two ranks have the last stage of a bidirectional schedule
    for one in told:
        assert one == told[0]
        assert abs(one - loss.item()) <= 1e-12 * abs(loss.item())
    for result in results:
        require_near(result.gradients, gradients)
    assert {name for result in results for name in result.gradients} == set(gradients)


def drawn_at_random(seed: int, max_ranks: int = 4) -> Schedule:
    """A sound schedule as nobody would draw it: any stage on any rank, sometimes two paths, in any order."""
    random = Random(seed)
    ranks, microbatches = random.randint(1, max_ranks), random.randint(1, 5)
    holders = [*range(ranks), *(random.randrange(ranks) for _ in range(random.randint(0, 4)))]
    random.shuffle(holders)
    paths = [tuple(holders), tuple(ranks - 1 - rank for rank in holders)][: random.randint(1, 2)]
    return ordered_at_random(Placement(tuple(paths)), microbatches, random, f"random-{seed}")


def ordered_at_random(placement: Placement, microbatches: int, random: Random, name: str) -> Schedule:
    """Any order in which inputs come first; backwards whole or in halves; some forwards paired with the backward after
    them.
    """
    rows: list[list[Entry]] = [[] for _ in range(placement.num_ranks)]
    ready = [Action(Kind.F, 0, microbatch) for microbatch in range(microbatches)]
    while ready:
        action = ready.pop(random.randrange(len(ready)))
        rows[placement.rank_of(action.stage, action.microbatch)].append(action)
        ready += _enabled(action, placement.num_stages - 1, random)
    schedule = Schedule(name, placement, microbatches, tuple(map(tuple, rows)))
    for rank in range(placement.num_ranks):
        schedule = _paired(schedule, rank, random)
    return schedule


def _enabled(action: Action, last: int, random: Random) -> list[Action]:
    """What can run once `action` has."""
    stage, microbatch = action.stage, action.microbatch
    backward = Kind.B if random.random() < 0.5 else Kind.I
    match action.kind:
        case Kind.F if stage < last:
            return [replace(action, stage=stage + 1)]
        case Kind.F:
            return [replace(action, kind=backward)]
        case Kind.W:
            return []
    after = [Action(backward, stage - 1, microbatch)] if stage > 0 else []
    return [*after, Action(Kind.W, stage, microbatch)] if action.kind is Kind.I else after


def _paired(schedule: Schedule, rank: int, random: Random) -> Schedule:
    """With some forwards on `rank` paired with the backward after them, where that leaves the schedule sound."""
    for position in range(len(schedule.rows[rank])):
        match schedule.rows[rank][position : position + 2]:
            case (Action(Kind.F) as forward, Action(Kind.B | Kind.I) as backward) if random.random() < 0.5:
                row = list(schedule.rows[rank])
                row[position : position + 2] = [Pair(forward, backward)]
                rows = (*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :])
                pairing = replace(schedule, rows=rows)
                schedule = schedule if verify(pairing) else pairing
    return schedule
