"""Ranks that do different things, or read different data, are told so on every rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel
from tests.runtime.work import build, gradients_of, require_near

MODEL = PlainModel()
GPIPE = make_schedule("gpipe", ranks=2, microbatches=2)


def otherwise(batch: tuple[Tensor, Tensor], what: str) -> tuple[Tensor, Tensor]:
    """A batch of the same size, which differs in that."""
    (inputs, labels), (others, targets) = batch, MODEL.batch(len(batch[0]), seed=1)
    rows = {"first row": labels.clone(), "last row": labels.clone()}
    rows["first row"][0], rows["last row"][-1] = targets[0], targets[-1]
    differing = {"all": (others, targets), "inputs": (others, labels), "labels": (inputs, targets)}
    return differing[what] if what in differing else (inputs, rows[what])


def run_reading(what: str) -> None:
    """The batches of the two ranks are equally large."""
    rank = current_context().pipeline_rank
    pipeline = build(MODEL, GPIPE)
    mine = MODEL.batch(4)
    batch = mine if rank == 0 else otherwise(mine, what)
    for forward_only in (False, True):
        with pytest.raises(UsageError, match="rank 1 read another batch than rank 0: all ranks of a replica need the"):
            execute_pipeline(iter([batch]), pipeline, forward_only=forward_only)
    pipeline.zero_grad()
    execute_pipeline(iter([mine]), pipeline)
    require_near(gradients_of(pipeline), MODEL.plain_step(mine)[1])


@pytest.mark.parametrize("what", ["all", "inputs", "labels", "first row", "last row"])
def test_other_batches_of_the_same_size_are_told_to_all(what: str) -> None:
    run_threads(run_reading, 2, what)


def test_other_batches_of_the_same_size_are_told_to_all_over_gloo() -> None:
    run_processes(run_reading, 2, "all")


def run_replicas() -> None:
    """Each replica has data of its own."""
    pipeline = build(MODEL, GPIPE)
    execute_pipeline(iter([MODEL.batch(4, seed=current_context().data_rank)]), pipeline)


def test_replicas_read_other_batches() -> None:
    run_threads(run_replicas, 4, data=2)


# what rank 0 and rank 1 do, and what all are told
CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"forward_only": True}, {}, "rank 1 trains, but rank 0 evaluates: all ranks must make the same call"),
    ({"broadcast_loss": True}, {}, "rank 1 trains, but rank 0 trains, broadcast_loss=True: all ranks must make"),
    ({"return_outputs": True}, {}, "rank 1 trains, but rank 0 trains, return_outputs=True: all ranks must make"),
    ({}, {"schedule": make_schedule("1f1b", ranks=2, microbatches=2)}, "rank 1 was given another schedule than rank 0"),
]


# what would wait for ever, and what all are told when the time is up
WAITING: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {},
        {"forward_only": True},
        "(trains|evaluates) with 'gpipe', 2 microbatches, but rank . (trains|evaluates) with 'gpipe', 2 microbatches",
    ),
    (
        {"trace": True},
        {},
        "trains, trace=True with 'gpipe', 2 microbatches|trains with 'gpipe', 2 microbatches, but rank",
    ),
]


def run_waiting(which: int) -> str:
    """The error of this rank; and the next step works."""
    rank = current_context().pipeline_rank
    *calls, message = WAITING[which]
    pipeline = build(MODEL, GPIPE)
    with pytest.raises((UsageError, PipelineError), match=message) as caught:
        execute_pipeline(iter([MODEL.batch(4)]), pipeline, **calls[rank])
    pipeline.zero_grad()
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    require_near(gradients_of(pipeline), MODEL.plain_step(MODEL.batch(4))[1])
    return str(caught.value)


@pytest.mark.some(1)
@pytest.mark.parametrize("which", range(len(WAITING)))
def test_other_calls_that_wait_for_each_other_are_told_to_all(which: int) -> None:
    assert len(set(run_threads(run_waiting, 2, which, timeout=0.3))) == 1


@pytest.mark.exhaustive
def test_other_calls_are_told_to_all_over_gloo() -> None:
    assert len(set(run_processes(run_waiting, 2, 0, timeout=1.0))) == 1


def run_counts(counts: list[int]) -> str:
    pipeline = build(MODEL, GPIPE)
    schedule = make_schedule("gpipe", ranks=2, microbatches=counts[current_context().pipeline_rank])
    with pytest.raises(UsageError) as caught:
        execute_pipeline(iter([MODEL.batch(12)]), pipeline, schedule=schedule)
    pipeline.zero_grad()
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    require_near(gradients_of(pipeline), MODEL.plain_step(MODEL.batch(4))[1])
    return str(caught.value)


@pytest.mark.parametrize(
    ("start", "counts"),
    [(run_threads, [2, 3]), (run_threads, [3, 2]), pytest.param(run_processes, [2, 3], marks=pytest.mark.slow)],
)
def test_schedules_of_other_numbers_of_microbatches_are_told(start: Any, counts: list[int]) -> None:
    [told] = set(start(run_counts, 2, counts))
    said = [f"trains with 'gpipe', {count} microbatches" for count in counts]
    assert f"rank 1 failed: it {said[1]}, but rank 0 {said[0]}: all ranks must make the same call" in told


def run_late_failure() -> str:
    """Rank 1 fails in a call that rank 0 has left."""
    context = current_context()
    if context.rank:
        with pytest.raises(PipelineError), context.alarm.raised_everywhere("evaluates"):
            raise ValueError("too late")
        return ""
    with context.alarm.raised_everywhere("evaluates"):
        pass
    with pytest.raises(PipelineError) as caught, context.alarm.raised_everywhere("trains"):
        all_gather(context.world, [0.0])
    return str(caught.value)


def test_a_failure_in_an_earlier_call_is_not_taken_for_another_call() -> None:
    told = run_threads(run_late_failure, 2)[0]
    assert "rank 1 failed: ValueError: too late" in told
    assert "same call" not in told


class Nesting(nn.Module):
    """A stage that runs the pipeline that it is part of."""

    pipeline: list[Pipeline]

    def forward(self, hidden: Tensor) -> Tensor:
        execute_pipeline(iter([MODEL.batch(4)]), self.pipeline[0], forward_only=True)
        return hidden


def run_nested() -> None:
    stage = Nesting()
    pipeline = Pipeline(stage, make_schedule("1f1b", ranks=1, microbatches=2), criterion=MODEL.criterion)
    stage.pipeline = [pipeline]
    with pytest.raises(UsageError, match="execute_pipeline was called within a step of the same Pipeline"):
        execute_pipeline(iter([MODEL.batch(4)]), pipeline, forward_only=True)


def test_a_step_within_a_step_is_an_error() -> None:
    run_threads(run_nested, 1)


def run_calling(which: int) -> None:
    rank = current_context().pipeline_rank
    *calls, message = CALLS[which]
    pipeline = build(MODEL, GPIPE)
    with pytest.raises((UsageError, PipelineError), match=message):
        execute_pipeline(iter([MODEL.batch(4)]), pipeline, **calls[rank])
    pipeline.zero_grad()
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    require_near(gradients_of(pipeline), MODEL.plain_step(MODEL.batch(4))[1])


@pytest.mark.parametrize("which", range(len(CALLS)))
def test_other_calls_that_end_are_told_to_all(which: int) -> None:
    run_threads(run_calling, 2, which)
