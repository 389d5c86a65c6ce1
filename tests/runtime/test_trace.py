"""The timeline of a traced step: what ran, where, in which order, the same on every rank."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Kind, Pipeline, Timeline, execute_pipeline, simulate
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.dataflow import Stream
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import TiedModel
from tests.runtime.work import build, each_once, schedule_of, variants

Variant = tuple[str, int, int]
MICROBATCHES = 5
MODEL = TiedModel(12)


def run_traced(variant: Variant) -> tuple[Timeline, Timeline, float]:
    """A timeline of training and one of evaluation; and the seconds that the first step took."""
    pipeline = build(MODEL, schedule_of(variant, MICROBATCHES))
    batch = MODEL.batch(MICROBATCHES)
    execute_pipeline(iter([batch]), pipeline)
    started = time.perf_counter()
    trained = execute_pipeline(iter([batch]), pipeline, trace=True)
    seconds = time.perf_counter() - started
    evaluated = execute_pipeline(iter([batch]), pipeline, forward_only=True, trace=True)
    assert trained.timeline is not None
    assert evaluated.timeline is not None
    assert execute_pipeline(iter([batch]), pipeline).timeline is None
    return trained.timeline, evaluated.timeline, seconds


def require_traced(variant: Variant, results: list[tuple[Timeline, Timeline, float]]) -> None:
    schedule = schedule_of(variant, MICROBATCHES).without_pairs()
    trained, evaluated, _ = results[0]
    for mine, its, seconds in results:
        assert (mine, its) == (trained, evaluated)
        assert 0 < mine.makespan < max(seconds for _, _, seconds in results)
        assert min(span.start for span in mine) > -0.1 * seconds  # ranks begin within an agreement of each other
    for timeline, ran in ((trained, schedule), (evaluated, schedule.forward_only())):
        assert (timeline.name, timeline.placement, timeline.unit) == (schedule.name, schedule.placement, "s")
        computed = timeline.on(Stream.COMPUTE)
        assert tuple(tuple(span.action for span in row) for row in computed) == ran.rows
        for rank, row in enumerate(computed):
            assert all(span.rank == rank and span.start < span.end for span in row)
            assert all(before.end <= after.start for before, after in pairwise(row))
        assert timeline.peak_activations == simulate(ran).peak_activations
        assert timeline.span <= timeline.makespan - min(span.start for span in timeline) + 1e-9
    cost = measured_costs(trained)
    assert all(value > 0 for value in (*cost.forward, *cost.backward_input, *cost.backward_weight))
    assert cost.latency >= 0
    assert cost.unit == "s"
    assert simulate(schedule, cost).makespan > 0


@pytest.mark.some(6)
@pytest.mark.parametrize("variant", each_once(variants()))
def test_threads(variant: Variant) -> None:
    require_traced(variant, run_threads(run_traced, variant[1], variant))


@pytest.mark.slow
def test_gloo() -> None:
    for variant in (("1f1b", 4, 1), ("interleaved-1f1b", 4, 2)):
        require_traced(variant, run_processes(run_traced, 4, variant))


class Slow(nn.Module):
    """Takes some milliseconds, more on later stages; backward takes none."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(0.02 * (self.stage + 1))
        return hidden * self.weight


def run_slow() -> Timeline:
    schedule = schedule_of(("1f1b", 3, 1), 3)
    chunk = Slow(current_context().pipeline_rank)
    pipeline = Pipeline(chunk, schedule, criterion=lambda output, _: output.mean())
    timeline = execute_pipeline(iter([(torch.ones(3, 2), None)]), pipeline, trace=True).timeline
    assert timeline is not None
    return timeline


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_spans_last_as_long_as_their_actions(start: Any) -> None:
    timeline, *_ = start(run_slow, 3)
    for span in timeline:
        slept = 0.02 * (span.action.stage + 1) if span.action.kind is Kind.F else 0.0
        assert span.end - span.start >= slept
    assert all(time >= 0.02 * (stage + 1) for stage, time in enumerate(measured_costs(timeline).forward))
    assert timeline.rows[2][0].start >= 0.06  # after two forwards


def test_every_input_was_made_before_it_was_used() -> None:
    [timeline, *_] = [trained for trained, _, _ in run_threads(run_traced, 4, ("1f1b", 4, 1))]
    ends = {str(span.action): span.end for span in timeline}
    starts = {str(span.action): span.start for span in timeline}
    for microbatch in range(MICROBATCHES):
        for stage in range(3):
            assert ends[f"{stage}F{microbatch}"] < starts[f"{stage + 1}F{microbatch}"]
            assert ends[f"{stage + 1}B{microbatch}"] < starts[f"{stage}B{microbatch}"]
