"""Simulations that stop once a step is known to be late."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from pipeflow import CostModel, Schedule, make_schedule
from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.in_time import LateError, in_time
from pipeflow.core.analysis.order import Turn
from pipeflow.core.analysis.simulation import simulate_shared
from pipeflow.schedules.registry import COMPARED

RANKS, MICROBATCHES = 4, 8
SHARES = (0.5, 0.9, 0.97, 0.999999, 1.0, 1.5)


def costs(schedule: Schedule) -> CostModel:
    """Stages that differ, transfers and reductions that take time."""
    stages = range(schedule.placement.num_stages)
    return CostModel(
        tuple(1.0 + stage % 3 / 7 for stage in stages),
        tuple(1.1 + stage % 2 / 5 for stage in stages),
        tuple(0.7 for _ in stages),
        reduce=tuple(0.3 for _ in stages),
        latency=0.05,
    )


def require_times(schedule: Schedule, cost: CostModel, processors: float = inf) -> int:
    """How many of SHARES of a makespan are found to be too short. Those that are not give the same timeline."""
    whole = simulate_shared(schedule, cost, processors)
    late = 0
    for share in SHARES:
        try:
            assert simulate_shared(schedule, cost, processors, share * whole.makespan) == whole
        except LateError:
            late += 1
            assert share < 1
    return late


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_late_is_longer_and_what_is_in_time_is_the_same(name: str) -> None:
    schedule = make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES).with_reductions()
    assert require_times(schedule, costs(schedule)) >= 2


def test_pairs_that_overlap_are_not_late() -> None:
    schedule = make_schedule("dualpipe", ranks=RANKS, microbatches=MICROBATCHES)
    assert require_times(schedule, replace(costs(schedule), overlap=1.0)) >= 1


@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_a_microbatch_counts_as_its_factor(factor: float) -> None:
    schedule = make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    factors = (*[1.0] * (MICROBATCHES - 2), factor, factor)
    assert require_times(schedule, replace(costs(schedule), microbatch_factors=(factors,) * RANKS)) >= 2


def test_ranks_that_share_processors_are_not_late() -> None:
    schedule = make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    assert require_times(schedule, costs(schedule), processors=2.0) >= 1


def test_the_first_turn_that_is_too_late_ends_it() -> None:
    """Rank 0 has to compute for 2 and was idle for 3."""
    turns = [(Turn(0, (Action(Kind.F, 0, m),), [], []), 2.0 + m, 3.0 + m, 3.0 + m, 0.0) for m in range(2)]
    reduction = (Turn(0, (Action(Kind.R, 0, 1),), [], []), 90.0, 99.0, 99.0, 0.0)
    assert list(in_time([*turns, reduction], [2.0], within=4.0)) == [*turns, reduction]
    late = iter([*turns, reduction])
    with pytest.raises(LateError):
        list(in_time(late, [2.0], within=3.9))
    assert list(late) == [turns[1], reduction]
