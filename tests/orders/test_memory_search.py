"""The search that decides order and memory together: figures of a paper's code, and what the search promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow import CostModel, Kind, Placement, Schedule, UsageError, simulate, verify, with_offload, with_recompute
from pipeflow.core.factors import each_factor
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.families import repeated_on, schedules_on
from pipeflow.schedules.order_search import search
from pipeflow.schedules.orders.memory_search import chunk_sets
from pipeflow.schedules.orders.problem import Objective
from pipeflow.schedules.orders.spilling import MemoryKind
from tests.covering import some_rows

BOTH: tuple[MemoryKind, ...] = ("offload", "recompute")


def unit_costs(placement: Placement, copy: float = 0.5) -> CostModel:
    """The costs of PipeOffload's tables: F = I = W = 1, what a forward saved is kept until W has ended, a copy takes
    `copy` of all three each way, and ranks 2i and 2i + 1 share a link.
    """
    ones, ranks = (1.0,) * placement.num_stages, placement.num_ranks
    groups = tuple(tuple(range(first, min(first + 2, ranks))) for first in range(0, ranks, 2))
    times = (3 * copy,) * len(ones)
    return CostModel(ones, ones, ones, saved_bytes=ones, deferred_bytes=ones, offload=times, copy_groups=groups)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "cap", "makespan"),
    some_rows([(4, 16, 2, 4, 103), (8, 16, 2, 6, 113), (8, 16, 3, 6, 171)], [(4, 16, 2, 4, 103), (8, 16, 2, 6, 113)]),
)
def test_makespans_of_uniform_and_grouped_orders_are_reached_in_less_memory(
    ranks: int, microbatches: int, chunks: int, cap: float, makespan: float
) -> None:
    """That paper's code needs 120, 144 and 207 for these peaks."""
    placement = Placement.looped(ranks, chunks)
    cost = unit_costs(placement)
    found = search(placement, microbatches, cost, bytes_cap=cap, kinds=BOTH, budget=0)
    assert found.timeline.makespan <= makespan
    assert max(found.timeline.peak_bytes) <= cap
    assert verify(found.schedule) == []
    assert found.timeline == simulate(found.schedule, cost)
    assert 3 * microbatches * chunks <= found.lower_bound <= makespan


@pytest.mark.parametrize(
    ("microbatches", "chunks", "cap", "makespan", "published"), [(16, 3, 6, 186, 207), (32, 4, 9, 437, 486)]
)
def test_orders_that_repeat_keep_a_shared_link_busy(
    microbatches: int, chunks: int, cap: float, makespan: float, published: float
) -> None:
    """Offload alone takes as long as all computations. `published` are the makespans of that paper's code."""
    placement = Placement.looped(8, chunks)
    cost = unit_costs(placement)
    found = search(placement, microbatches, cost, bytes_cap=cap, kinds=["offload"], budget=0)
    assert found.timeline.makespan <= makespan < published
    assert max(found.timeline.peak_bytes) <= cap


@pytest.mark.parametrize("placement", [Placement.looped(3, 2), Placement.vee(4), Placement(((0, 0, 1, 0, 1),))])
def test_in_orders_that_repeat_a_microbatch_more_takes_a_period_more(placement: Placement) -> None:
    ones = (1.0,) * placement.num_stages
    cost = CostModel(ones, ones, ones)
    period = 3 * max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks))
    few, many = ([*repeated_on(placement, microbatches)] for microbatches in (5, 9))
    assert len({each.rows for each in few}) > 1
    assert not any(verify(each) for each in many)
    for one, other in zip(few, many, strict=True):
        assert simulate(other, cost).makespan == simulate(one, cost).makespan + 4 * period
    assert [*repeated_on(Placement.linear(4), 4)] == [*repeated_on(Placement.bidirectional(4), 4)] == []


def random_cost(placement: Placement, draw: Random, microbatches: int) -> CostModel:
    stages, ranks = placement.num_stages, placement.num_ranks

    def drawn(low: float, high: float) -> tuple[float, ...]:
        return tuple(draw.uniform(low, high) for _ in range(stages))

    rows = tuple(tuple(draw.uniform(0.5, 2) for _ in range(microbatches)) for _ in range(stages))
    cost = CostModel(
        drawn(0.5, 2),
        drawn(0.5, 2),
        drawn(0.5, 2),
        latency=draw.choice((0.0, 0.2)),
        saved_bytes=drawn(1, 3),
        deferred_bytes=draw.choice(((), drawn(0.5, 2))),
        input_bytes=draw.choice(((), drawn(0, 0.5))),
        offload=drawn(0.2, 3),
        recompute=draw.choice(((), drawn(0.3, 1))),
        copy_groups=draw.choice(((), (tuple(range(ranks)),))),
        microbatch_factors=draw.choice(((), rows[0], rows)),
    )
    return replace(cost, bandwidth=2.0, activation_bytes=(1.0,) * stages) if draw.random() < 0.3 else cost


def simple_uses(schedule: Schedule, cost: CostModel, kinds: tuple[MemoryKind, ...]) -> Iterator[Schedule]:
    sets = chunk_sets(schedule.placement)
    recomputed = [schedule, *(with_recompute(schedule, stages) for stages in sets if "recompute" in kinds)]
    yield from recomputed
    if "offload" in kinds:
        yield from (with_offload(each, cost, stages) for each in recomputed for stages in sets)


def value(timeline: Timeline, objective: Objective) -> float:
    return timeline.span if objective == "span" else timeline.makespan


@settings(max_examples=30)
@given(
    placement=st.sampled_from([Placement.linear(3), Placement.looped(2, 2), Placement.looped(3, 3), Placement.vee(3)]),
    many=st.integers(1, 8),
    seed=st.integers(0, 999),
    room=st.floats(0.7, 2),
    kinds=st.sampled_from([("offload",), ("recompute",), BOTH]),
    objective=st.sampled_from(["makespan", "span"]),
)
@pytest.mark.exhaustive
def test_never_worse_than_a_named_schedule_with_simple_uses_within_the_cap(
    placement: Placement, many: int, seed: int, room: float, kinds: tuple[MemoryKind, ...], objective: Objective
) -> None:
    cost = random_cost(placement, Random(seed), many)
    largest = max((factor for _, factor in each_factor(cost.microbatch_factors)), default=1.0)
    each = map(max, cost.saved_bytes, cost.deferred_bytes or cost.saved_bytes)
    whole = sum(each) * largest / placement.num_ranks
    cap = room * whole
    timelines = [
        simulate(use, cost) for start in schedules_on(placement, many) for use in simple_uses(start, cost, kinds)
    ]
    within = [value(each, objective) for each in timelines if max(each.peak_bytes) <= cap * (1 + 1e-9)]
    sought = partial(search, placement, many, cost, kinds=kinds, objective=objective, bytes_cap=cap, candidates=10)
    try:
        found = sought()
    except UsageError:
        assert not within
        return
    assert verify(found.schedule) == []
    assert found.timeline == simulate(found.schedule, cost)
    assert max(found.timeline.peak_bytes) <= cap * (1 + 1e-6)
    assert found.lower_bound <= value(found.timeline, objective) <= min(within, default=1e9) * (1 + 1e-9)


def test_caps_may_count_activations() -> None:
    placement = Placement.linear(4)
    cost = CostModel.even(placement, offload=1)
    within = search(placement, 8, cost, memory_cap=2, candidates=20)
    found = search(placement, 8, cost, memory_cap=2, kinds=["offload"], candidates=20)
    assert max(found.timeline.peak_activations) <= 2
    assert found.timeline.makespan < within.timeline.makespan
    assert {action.kind for rank in range(4) for action in found.schedule.actions(rank)} >= {Kind.O, Kind.L}


def test_the_result_depends_on_the_candidates_alone() -> None:
    placement = Placement.looped(2, 2)
    options: dict[str, Any] = {"bytes_cap": 2, "kinds": BOTH, "candidates": 60}
    one, other = (search(placement, 6, unit_costs(placement), **options) for _ in range(2))
    assert one == other


def test_without_a_cap_kinds_change_nothing() -> None:
    placement = Placement.vee(3)
    one, other = (search(placement, 6, unit_costs(placement), kinds=kinds, candidates=40) for kinds in ((), BOTH))
    assert one == other


def test_what_cannot_be_kept_is_told() -> None:
    placement = Placement.linear(3)
    cost = unit_costs(placement)
    for kinds in (BOTH, BOTH[:1]):
        with pytest.raises(UsageError, match="the one that keeps least needs 1 on the rank that keeps most"):
            search(placement, 6, cost, bytes_cap=0.5, kinds=kinds, candidates=5)
    with pytest.raises(UsageError, match="the costs have no time of a copy to the host"):
        search(placement, 6, replace(cost, offload=()), bytes_cap=2, kinds=["offload"])
    with pytest.raises(UsageError, match="a search knows the kinds offload and recompute, not 'swap'"):
        search(placement, 6, cost, bytes_cap=2, kinds=["swap"])  # type: ignore[list-item] # unchecked callers
