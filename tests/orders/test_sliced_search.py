"""The search over slices of microbatches: against all orders, against the named schedules, and run by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Span, Timeline
from pipeflow.schedules import make_schedule
from pipeflow.schedules.families import schedules_on
from pipeflow.schedules.order_search import search
from pipeflow.schedules.orders.list_scheduling import run_times
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.problem import Objective, make_problem, to_schedule, to_sequences
from pipeflow.testing import run_threads
from tests.orders.test_search import OBJECTIVES, random_cost, require_sound_candidates, value, with_bytes, with_factors
from tests.runtime.test_slices import batch_of, require, step

LINEAR = Placement.linear(4)
SIZED: dict[str, Any] = {"saved_bytes": (8.0,) * 4, "deferred_bytes": (3.0,) * 4}
OVERTAKING = """0F0.0,0F1.0,0F1.1,0F0.1,0I1.1,0I0.1,0I1.0,0W1.1,0I0.0,0W0.1,0W1.0,0W0.0
1F0.0,1F1.0,1F0.1,1F1.1,1I1.1,1I0.1,1I1.0,1W1.1,1I0.0,1W0.1,1W1.0,1W0.0"""
UNEVEN = CostModel((1, 1.2, 0.8, 1.3), (1.1, 1.4, 0.9, 1.6), (0.8, 0.7, 0.9, 0.6), latency=0.05, attention=0.5)


def sliced_cost(stages: int, slices: int, seed: int) -> CostModel:
    """With attention, bytes of keys, links that carry bytes and, with odd seeds, slices that end anywhere."""
    cost, draw = with_bytes(random_cost(stages, seed), seed), Random(seed)
    keys = {
        content: tuple(draw.uniform(0, 1) for _ in range(stages)) for content in (Content.KEYS, Content.KEYS_GRADIENT)
    }
    ends = tuple(sorted(draw.uniform(0.1, 1) for _ in range(slices))) if seed % 2 else ()
    return replace(cost, attention=draw.random(), slice_ends=ends, kept_bytes=keys)


def every_row(stage: int, microbatches: int, slices: int, *, at_once: bool) -> Iterator[tuple[Action, ...]]:
    """Every order of a rank in which microbatches of a slice, and slices of a microbatch, come in order. Each W is run
    directly after its I if `at_once`, else at any time in their order.
    """
    every = [(m, part) for m in range(microbatches) for part in range(slices)]
    first = {
        Kind.F: lambda m, part: {(m - 1, part), (m, part - 1)},
        Kind.I: lambda m, part: {(m - 1, part), (m, part + 1)},
    }

    def grow(row: tuple[Action, ...], waiting: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        if len(row) == 3 * len(every):
            yield row
        ran = {kind: {each.work[1:] for each in row if each.kind is kind} for kind in first}
        for (kind, needs), (m, part) in product(first.items(), every):
            is_next = (m, part) not in ran[kind] and needs(m, part) & {*every} <= ran[kind]
            if is_next and (kind is Kind.F or (m, slices - 1) in ran[Kind.F]):
                action = Action(kind, stage, m, part)
                later = (action.as_kind(Kind.W),) * (kind is Kind.I)
                yield from grow((*row, action, *later), waiting) if at_once else grow((*row, action), waiting + later)
        if waiting:
            yield from grow((*row, waiting[0]), waiting[1:])

    return grow((), ())


@pytest.mark.parametrize(("microbatches", "slices"), [(1, 3), (2, 2)])
@pytest.mark.slow
def test_of_all_orders_none_is_better_than_what_is_found(microbatches: int, slices: int) -> None:
    """For two microbatches weight gradients take no time, so that each may come directly after its I. The bound holds
    for all orders; what is found is as good as all in which no microbatch overtakes another one.
    """
    cost = replace(random_cost(2, 3), attention=0.6, slice_ends=tuple(range(1, slices + 1)))
    at_once = microbatches > 1
    if at_once:
        cost = replace(cost, backward_weight=(0.0, 0.0))
    rows = [list(every_row(stage, microbatches, slices, at_once=at_once)) for stage in range(2)]
    every = []
    for pair in product(*rows):
        try:
            every.append(simulate(Schedule("any", Placement.linear(2), microbatches, pair, slices), cost))
        except ScheduleError:  # the ranks wait for each other
            continue
    in_order = [each for each in every if not any(map(overtakes, each.rows))]
    for objective in OBJECTIVES:
        best, usual = (min(value(timeline, objective) for timeline in some) for some in (every, in_order))
        found = search(Placement.linear(2), microbatches, cost, objective=objective, candidates=500, slices=slices)
        assert verify(found.schedule) == []
        assert value(found.timeline, objective) <= usual * (1 + 1e-9)
        assert found.lower_bound <= best * (1 + 1e-9)


def overtakes(row: Sequence[Span]) -> bool:
    forwards = [span.action.microbatch for span in row if span.action.kind is Kind.F]
    return forwards != sorted(forwards)


def least_caps(placement: Placement, cost: CostModel, slices: int, *, in_bytes: bool) -> list[float]:
    """Per rank, room for one microbatch."""
    if not in_bytes:
        return [len(placement.stages_of(rank)) / placement.chunks_per_rank for rank in range(placement.num_ranks)]
    found = []
    for stages in map(placement.stages_of, range(placement.num_ranks)):
        forwards = sum(cost.saved_bytes[stage] + cost.kept_bytes[Content.KEYS][stage] for stage in stages)
        found.append(forwards + sum(cost.kept_bytes[Content.KEYS_GRADIENT][s] + cost.deferred_bytes[s] for s in stages))
    return found


placements = st.one_of(
    st.builds(Placement.linear, st.integers(1, 4)),
    st.builds(Placement.looped, st.integers(1, 3), st.integers(1, 2)),
    st.builds(Placement.vee, st.integers(1, 3)),
    st.sampled_from([Placement(((1, 0, 2, 1, 0),)), Placement(((0, 1, 0, 0),))]),
)


@settings(max_examples=60)
@given(
    placement=placements,
    many=st.integers(1, 5),
    slices=st.integers(2, 4),
    seed=st.integers(0, 99),
    room=st.floats(0, 3),
    in_bytes=st.booleans(),
    differ=st.booleans(),
    objective=st.sampled_from(OBJECTIVES),
)
@pytest.mark.slow
def test_every_candidate_is_sound_within_the_cap_and_above_the_bound(
    placement: Placement,
    many: int,
    slices: int,
    seed: int,
    room: float,
    in_bytes: bool,
    differ: bool,
    objective: Objective,
) -> None:
    cost, draw = sliced_cost(placement.num_stages, slices, seed), Random(seed)
    cost = with_factors(cost, many, seed) if differ else cost
    largest = max(map(max, cost.factors), default=1)
    caps = [each * largest + draw.random() * room for each in least_caps(placement, cost, slices, in_bytes=in_bytes)]
    problem = make_problem(
        placement, many, cost, **{"bytes_cap" if in_bytes else "memory_cap": caps}, objective=objective, slices=slices
    )
    require_sound_candidates(problem, cost, caps, draw, in_bytes=in_bytes)


@pytest.mark.parametrize("factors", [(), (2.0,)])
def test_the_bound_counts_that_slices_of_a_microbatch_follow_each_other(factors: tuple[float, ...]) -> None:
    """One microbatch goes down and up the ranks: 4 slices and 3 more forwards, then as many backwards."""
    cost = replace(CostModel.even(LINEAR), microbatch_factors=factors)
    found = search(LINEAR, 1, cost, candidates=50, slices=4)
    assert found.lower_bound == pytest.approx((7 + 7 + 4) / 4 * sum(factors or (1.0,)))
    assert found.gap < 1e-9


def test_under_a_cap_the_bound_lets_a_slice_of_a_later_stage_go_before_one_of_an_earlier_stage() -> None:
    """On rank 1 a long backward keeps the second slice waiting while a slice of a new microbatch passes both stages."""
    placement, cap = Placement.vee(2), [9, 1.25]
    cost = CostModel((1, 0.1, 5, 0.1), (1, 0.1, 0.1, 5), (0, 0, 0, 0))
    found = search(placement, 2, cost, memory_cap=cap, candidates=120, slices=2)
    bound = bounds(make_problem(placement, 2, cost, cap, slices=2)).objective
    assert 0.98 * found.timeline.makespan < bound <= found.timeline.makespan * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_sequences_run_as_simulated(name: str) -> None:
    """Slices of unlike length and times; no value waits for a link. Or microbatches differ, too."""
    schedule = make_schedule(name, ranks=3, microbatches=4, slices=3)
    stages = schedule.placement.num_stages
    cost, differs = sliced_cost(stages, 3, 1), name == "zb-v"
    sent: dict[str, Any] = {"activation_bytes": (1.0,) * stages, "bandwidth": 50.0}
    cost = with_factors(cost, 4, 1) if differs else replace(cost, **sent)
    problem = make_problem(schedule.placement, 4, cost, slices=3)
    sequences = to_sequences(schedule)
    times = run_times(problem, sequences)
    assert times is not None
    timeline = simulate(to_schedule("halves", problem, sequences), cost)
    for row, starts in zip(timeline.rows, times.starts, strict=True):
        assert [span.start for span in row] == pytest.approx(starts)


def test_a_span_is_counted_from_the_start_of_each_rank() -> None:
    found = search(LINEAR, 8, CostModel.even(LINEAR), objective="span", candidates=300, slices=2)
    assert found.timeline.span == pytest.approx(24)
    assert found.gap == 0
    starts = bounds(make_problem(LINEAR, 8, CostModel.even(LINEAR), objective="span", slices=2)).starts
    assert starts == [0, 0.5, 1, 1.5]  # each rank begins after one slice of each rank before it


@pytest.mark.parametrize("cap", [{}, {"memory_cap": 1.5}, {"memory_cap": 2}, {"bytes_cap": 24.0}])
@pytest.mark.parametrize("placement", [LINEAR, Placement.looped(2, 2), Placement.vee(2)])
@pytest.mark.slow
def test_never_worse_than_any_named_schedule_with_as_many_slices(placement: Placement, cap: dict[str, Any]) -> None:
    """However small the budget. Links are occupied, and a backward that is split keeps more."""
    keys = {Content.KEYS: (1.0,) * 4, Content.KEYS_GRADIENT: (1.0,) * 4}
    cost = replace(UNEVEN, **SIZED, kept_bytes=keys, bandwidth=2.0, activation_bytes=(0.2,) * 4)
    found = search(placement, 8, cost, candidates=1, slices=4, **cap)
    assert verify(found.schedule) == []
    assert found.timeline == simulate(found.schedule, cost)
    assert keeps(found.timeline, **cap)
    named = list(schedules_on(placement, 8, 4))
    assert named
    for schedule in named:
        timeline = simulate(schedule, cost)
        if keeps(timeline, **cap):
            assert found.timeline.makespan <= timeline.makespan * (1 + 1e-9), schedule.name


def keeps(timeline: Timeline, memory_cap: float | None = None, bytes_cap: float | None = None) -> bool:
    if bytes_cap is not None:
        return max(timeline.peak_bytes) <= bytes_cap * (1 + 1e-9)
    return memory_cap is None or max(timeline.peak_activations) <= memory_cap * (1 + 1e-9)


@pytest.mark.slow
def test_an_order_beats_the_named_ones_with_no_more_memory() -> None:
    """Stages of unlike cost: the best order, proved, within the memory that seq1f1b keeps at most."""
    named = [simulate(make_schedule(name, ranks=4, microbatches=16, slices=4), UNEVEN) for name in ("1f1b", "zb-h1")]
    cap = max(named[0].peak_activations)
    found = search(LINEAR, 16, UNEVEN, memory_cap=cap, candidates=300, slices=4)
    assert max(found.timeline.peak_activations) <= cap * (1 + 1e-9)
    assert found.timeline.makespan < 0.992 * min(each.makespan for each in named)
    assert found.gap < 1e-9


@pytest.mark.slow
def test_a_found_order_trains_as_whole_sequences_do() -> None:
    batch = batch_of(4, 30)
    for schedule in (
        search(LINEAR, 2, UNEVEN, candidates=30, slices=3).schedule,
        Schedule.from_csv(OVERTAKING, name="slices of another microbatch in between"),
    ):
        assert verify(schedule) == []
        require([*run_threads(step, schedule.placement.num_ranks, schedule, batch)], batch)


def test_what_cannot_be_searched_for_is_refused() -> None:
    cost = CostModel.even(LINEAR, saved_bytes=8, offload=0.1)
    start = make_schedule("1f1b", ranks=4, microbatches=4, slices=2)
    with pytest.raises(UsageError, match="start '1f1b' has slices=2, and the search has slices=4"):
        search(LINEAR, 4, cost, slices=4, start=[start])
    with pytest.raises(UsageError, match="has slices=2, and the search has slices=1: give both the same number"):
        search(LINEAR, 4, cost, start=[start])
    with pytest.raises(UsageError, match="a search with kinds takes no slices"):
        search(LINEAR, 4, cost, slices=2, bytes_cap=16, kinds=["offload"])
    with pytest.raises(UsageError, match="slices"):
        search(LINEAR, 4, cost, slices=0)
    with pytest.raises(UsageError, match="slice_ends has 3 numbers, but the schedule has 2 slices"):
        search(LINEAR, 4, replace(cost, slice_ends=(1, 2, 3)), slices=2)
    buffers = {Content.KEYS: (1.0,) * 4, Content.KEYS_GRADIENT: (2.0,) * 4}  # half of the latter: of the first slice
    with pytest.raises(UsageError, match=r"bytes_cap 9.5 is too small: rank 0 needs at least 10, for one microbatch"):
        search(LINEAR, 4, replace(cost, kept_bytes=buffers), slices=2, bytes_cap=9.5)
    with pytest.raises(UsageError, match=r"memory_cap 0.9 is too small: rank 0 needs at least 1, for one microbatch"):
        search(LINEAR, 4, cost, slices=2, memory_cap=0.9)
