"""Schedules with recomputation and offload: sound, with less memory, and not slower than they say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pipeflow import (
    SCHEDULES,
    Action,
    CostModel,
    Kind,
    Schedule,
    UsageError,
    make_schedule,
    simulate,
    verify,
    with_offload,
    with_recompute,
)
from pipeflow.core.dataflow import Content, Stream
from tests.families import make_near


def costs(schedule: Schedule, offload: float = 1.5) -> CostModel:
    """The costs of PipeOffload's tables: a forward and each half take 1 per stage, a copy `offload` each way, and ranks
    2i and 2i + 1 share a link to their host. What a forward saved is kept until W has ended.
    """
    stages, ranks = schedule.placement.num_stages, schedule.placement.num_ranks
    ones = (1.0,) * stages
    groups = tuple(tuple(range(first, min(first + 2, ranks))) for first in range(0, ranks, 2))
    return CostModel(
        ones, ones, ones, saved_bytes=ones, deferred_bytes=ones, offload=(offload,) * stages, copy_groups=groups
    )


@cache
def near(name: str) -> Schedule:
    return make_near(name, ranks=4, microbatches=8)


@pytest.mark.parametrize("name", SCHEDULES)
def test_offloads_delay_nothing_and_free_memory(name: str) -> None:
    cost = costs(near(name))
    plain, offloaded = simulate(near(name), cost), with_offload(near(name), cost)
    assert verify(offloaded) == []
    timeline = simulate(offloaded, cost)
    assert timeline.makespan == pytest.approx(plain.makespan)
    assert all(now <= before for now, before in zip(timeline.peak_bytes, plain.peak_bytes, strict=True))
    if max(plain.peak_bytes) > 4:
        assert sum(timeline.peak_bytes) < sum(plain.peak_bytes)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_recomputed_is_kept_alone(name: str) -> None:
    recomputed = with_recompute(near(name))
    assert verify(recomputed) == []
    assert with_recompute(recomputed).rows == recomputed.rows
    timeline = simulate(recomputed, replace(costs(near(name)), deferred_bytes=()))
    chunks = near(name).placement.chunks_per_rank
    assert max(timeline.peak_activations) <= 2 / chunks
    assert max(timeline.peak_bytes) <= 2


def test_peaks_of_pipe_offload_are_reached_without_its_time() -> None:
    """Of 4 ranks, 16 microbatches and 2 chunks, that paper's code needs 120 for 4 activations on rank 0."""
    schedule = make_schedule("gis-h", ranks=4, microbatches=16, chunks=2)
    timeline = simulate(with_offload(schedule, costs(schedule)), costs(schedule))
    assert timeline.makespan == 104
    assert max(timeline.peak_bytes) == 4


def test_a_forward_before_its_backward_is_not_computed_again() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    assert with_recompute(schedule).rows[1] == schedule.rows[1]
    assert with_recompute(schedule, stages=[1]).rows == schedule.rows
    assert str(with_recompute(schedule)).startswith("rank 0: 0F0 0F1 0C0 0B0 0F2 0C1 0B1 0C2 0B2")


def test_the_memory_of_a_recomputation() -> None:
    """Inputs are kept from forwards on, the rest from recomputations on."""
    schedule = Schedule.from_csv("0F0,0F1,0C0,0B0,0C1,0B1\n1F0,1B0,1F1,1B1")
    cost = CostModel.even(schedule.placement, saved_bytes=10, input_bytes=2, recompute=0.5)
    timeline = simulate(schedule, cost)
    spans = {str(span.action): span for span in timeline}
    assert spans["0C0"].end - spans["0C0"].start == 0.5
    assert timeline.peak_activations == (1, 1)
    assert timeline.peak_bytes == (14, 10)
    assert simulate(schedule, replace(cost, recompute=())).rows[0][2].end == 3  # as long as a forward
    assert simulate(schedule, replace(cost, input_bytes=())).peak_bytes == (10, 10)


def test_an_offloaded_microbatch_is_freed_after_its_copy_and_kept_from_the_load_on() -> None:
    schedule = Schedule.from_csv("0F0,0O0,0F1,0L0,0B0,0B1\n1F0,1B0,1F1,1B1")
    cost = CostModel.even(schedule.placement, saved_bytes=10, offload=0.5)
    timeline = simulate(schedule, cost)
    assert timeline.memory(0) == ((0, 10), (1, 20), (1.5, 10), (2, 20), (6, 10), (9, 0))
    assert [len(timeline.on(stream)[0]) for stream in (Stream.OFFLOAD, Stream.LOAD)] == [1, 1]
    assert Content.HOST not in cost.sizes


def test_a_link_carries_one_copy_at_a_time() -> None:
    schedule = Schedule.from_csv("0F0,0O0,0L0,0B0\n1F0,1O0,1L0,1B0")
    cost = replace(CostModel.even(schedule.placement, offload=2), copy_groups=((0, 1),))
    spans = {str(span.action): span for span in simulate(schedule, cost)}
    assert [spans[name].start for name in ("0O0", "1O0", "0L0", "1L0", "1B0")] == [1, 3, 3, 5, 7]
    alone = {str(span.action): span for span in simulate(schedule, replace(cost, copy_groups=()))}
    assert [alone[name].start for name in ("0O0", "1O0", "0L0", "1L0", "1B0")] == [1, 2, 3, 4, 6]


def test_bad_input_is_told() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=2)
    with pytest.raises(UsageError, match="the costs have no time of a copy to the host"):
        with_offload(schedule, CostModel.even(schedule.placement))
    with pytest.raises(UsageError, match="there is no stage 2: the schedule has stages 0 to 1"):
        with_recompute(schedule, stages=[2])
    with pytest.raises(UsageError, match="has offloads already"):
        with_offload(with_offload(schedule, costs(schedule, 0.1)), costs(schedule, 0.1))
    with pytest.raises(UsageError, match="rank 1 is in more than one group"):
        replace(costs(schedule), copy_groups=((0, 1), (1,)))
    [lost] = verify(Schedule.from_csv("0F0,0O0,0B0\n1F0,1B0"))
    assert lost.problem == "0L0 is missing: stage 0 runs 0F0, 0B0 and 0O0 for microbatch 0"
    late = replace(schedule, rows=((*schedule.rows[0], Action(Kind.C, 0, 0)), schedule.rows[1]))
    assert any("0C0" in str(violation) for violation in verify(late))
