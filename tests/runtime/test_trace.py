"""The timeline of a traced step: what ran, where, in which order, the same on every rank."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from pipeflow import CostModel, Timeline, execute_pipeline, simulate
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import TiedModel
from tests.runtime.work import build, layouts, schedule_of

Layout = tuple[str, int, int]
MICROBATCHES = 5
MODEL = TiedModel(12)


def run_traced(layout: Layout) -> tuple[Timeline, Timeline, float]:
    """A timeline of training and one of evaluation; and the seconds that the first step took."""
    pipeline = build(MODEL, schedule_of(layout, MICROBATCHES))
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


def require_traced(layout: Layout, results: list[tuple[Timeline, Timeline, float]]) -> None:
    schedule = schedule_of(layout, MICROBATCHES)
    trained, evaluated, _ = results[0]
    for mine, its, seconds in results:
        assert (mine, its) == (trained, evaluated)
        assert 0 < mine.makespan < max(seconds for _, _, seconds in results)
        assert min(span.start for span in mine) > -0.1 * seconds  # ranks begin within an agreement of each other
    for timeline, plan in ((trained, schedule), (evaluated, schedule.forward_only())):
        assert (timeline.name, timeline.placement) == (schedule.name, schedule.placement)
        assert tuple(tuple(span.action for span in row) for row in timeline.rows) == plan.rows
        for rank, row in enumerate(timeline.rows):
            assert all(span.rank == rank and span.start < span.end for span in row)
            assert all(before.end <= after.start for before, after in pairwise(row))
        assert timeline.peak_activations == simulate(plan).peak_activations
        assert timeline.span <= timeline.makespan - min(span.start for span in timeline) + 1e-9
    cost = CostModel.measured(trained)
    assert all(value > 0 for value in (*cost.forward, *cost.backward_input, *cost.backward_weight))
    assert cost.latency >= 0
    assert simulate(schedule, cost).makespan > 0


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_threads(layout: Layout) -> None:
    require_traced(layout, run_threads(run_traced, layout[1], layout))


def test_gloo() -> None:
    for layout in (("1f1b", 4, 1), ("interleaved-1f1b", 4, 2)):
        require_traced(layout, run_processes(run_traced, 4, layout))


def test_every_input_was_made_before_it_was_used() -> None:
    [timeline, *_] = [trained for trained, _, _ in run_threads(run_traced, 4, ("1f1b", 4, 1))]
    ends = {str(span.action): span.end for span in timeline}
    starts = {str(span.action): span.start for span in timeline}
    for microbatch in range(MICROBATCHES):
        for stage in range(3):
            assert ends[f"{stage}F{microbatch}"] < starts[f"{stage + 1}F{microbatch}"]
            assert ends[f"{stage + 1}B{microbatch}"] < starts[f"{stage}B{microbatch}"]
