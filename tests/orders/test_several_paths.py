"""Searches on placements of several paths: bidirectional ones, replicas, and the ranks that are left of replicas."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil
from random import Random

import pytest

from pipeflow import (
    CostModel,
    Placement,
    Schedule,
    exact,
    make_schedule,
    replicated,
    search,
    simulate,
    verify,
    without_ranks,
)
from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.schedules.families import schedules_on
from pipeflow.schedules.orders.additions import with_recompute
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.problem import make_problem
from pipeflow.schedules.orders.search import Found, measured

FACTORS = 0.5, 1.5


def random_costs(stages: int, microbatches: int, random: Random) -> CostModel:
    """Costs that differ between stages, and between microbatches where the first number says so."""
    differ = random.random() < 0.5
    factors = tuple(random.uniform(*FACTORS) for _ in range(microbatches)) if differ else ()
    forward, dgrad, wgrad = (tuple(random.uniform(*FACTORS) for _ in range(stages)) for _ in range(3))
    return CostModel(forward, dgrad, wgrad, latency=random.choice((0.0, 0.3)), microbatch_factors=factors)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 6), (4, 8)])
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_no_schedule_of_two_paths_is_shorter_than_the_bound(ranks: int, microbatches: int, objective: str) -> None:
    placement, random = Placement.bidirectional(ranks), Random(ranks * microbatches)
    for _ in range(20):
        cost = random_costs(ranks, microbatches, random)
        for schedule in schedules_on(placement, microbatches):
            timeline = simulate(schedule.without_pairs(), cost)
            problem = make_problem(placement, microbatches, cost, timeline.peak_activations, None, objective)  # type: ignore[arg-type]
            assert bounds(problem).objective <= measured(timeline, problem.objective) * (1 + 1e-9)


@pytest.mark.parametrize(("microbatches", "cap", "best"), [(8, None, 25.0), (8, 3.0, 26.0), (6, 2.0, 25.0)])
def test_an_order_of_two_paths_keeps_less_or_takes_less_than_every_named_one(
    microbatches: int, cap: float | None, best: float
) -> None:
    """dualpipe takes 26 and 22 with five activations, chimera 30 and 25 with four."""
    placement = Placement.bidirectional(4)
    found = search(placement, microbatches, CostModel.even(placement), memory_cap=cap, candidates=500)
    assert not verify(found.schedule, memory_cap=cap)
    assert found.timeline.makespan == best
    assert max(found.timeline.peak_activations) <= (cap or 4)


def test_microbatches_that_differ_change_places_between_paths() -> None:
    placement, random = Placement.bidirectional(4), Random(1)
    for _ in range(4):
        cost = replace(random_costs(4, 8, random), microbatch_factors=tuple(random.uniform(*FACTORS) for _ in range(8)))
        found = search(placement, 8, cost, candidates=200)
        assert not verify(found.schedule)
        assert found.timeline.makespan < min(simulate(each, cost).makespan for each in schedules_on(placement, 8))
        assert found.timeline.makespan < 1.03 * found.lower_bound


def test_paths_in_opposite_directions_may_need_more_than_one_microbatch() -> None:
    placement = Placement.bidirectional(2)
    with pytest.raises(UsageError, match="wait for each other in all orders that were tried: allow more memory"):
        search(placement, 4, CostModel.even(placement), memory_cap=1, candidates=50)


def test_each_path_needs_a_microbatch() -> None:
    with pytest.raises(UsageError, match="no microbatch passes rank 2"):
        search(Placement(((0, 1), (2, 3))), 1, CostModel.even(Placement.linear(2)))


def test_the_solver_proves_an_order_of_several_paths() -> None:
    pytest.importorskip("ortools")
    placement = Placement(((0, 1), (2, 1)))
    cost = CostModel((1, 1), (1, 1), (1, 1))
    found = search(placement, 4, cost, memory_cap=(2, 2, 2), candidates=50)
    proved = exact(placement, 4, cost, memory_cap=(2, 2, 2))
    assert not verify(proved.schedule, memory_cap=2)
    assert proved.lower_bound == proved.timeline.makespan <= found.timeline.makespan


def alive_caps(replicas: int, ranks: int, dead: int) -> list[float]:
    """Two microbatches more than 1F1B keeps on ranks of the dead one's stage, and one more on others."""
    places = [place for place in product(range(replicas), range(ranks)) if place[0] * ranks + place[1] != dead]
    return [ranks - stage + 1 + (stage == dead % ranks) for _, stage in places]


def left(replicas: int, ranks: int, microbatches: int, dead: int, candidates: int | None = 100) -> Found:
    whole = replicated(make_schedule("zb-h1", ranks=ranks, microbatches=microbatches), replicas)
    return without_ranks(whole, [dead], memory_cap=alive_caps(replicas, ranks, dead), candidates=candidates)


CELLS = [(4, 4, 8, dead) for dead in range(16)]
LARGE = [(replicas, ranks, 16, stage) for replicas, ranks in ((8, 4), (4, 8)) for stage in range(ranks)]


@pytest.mark.parametrize(
    ("replicas", "ranks", "microbatches", "dead"),
    [*CELLS, *(pytest.param(*it, marks=pytest.mark.slow) for it in LARGE)],
)
def test_the_work_of_a_failed_rank_lies_in_bubbles(replicas: int, ranks: int, microbatches: int, dead: int) -> None:
    """A rank of the first stage waits for one unit under this cap: seven forwards would fill the way there and back."""
    found = left(replicas, ranks, microbatches, dead)
    stage, total = dead % ranks, replicas * microbatches
    bound = max(3 * (microbatches + ranks - 1), 3 * ceil(total / (replicas - 1)) + stage)
    assert not verify(found.schedule)
    assert found.timeline.makespan <= max(bound * 1.03, bound + 1)
    caps = alive_caps(replicas, ranks, dead)
    assert all(peak <= cap for peak, cap in zip(found.timeline.peak_activations, caps, strict=True))


def test_only_lost_microbatches_move_and_evenly() -> None:
    whole = replicated(make_schedule("1f1b", ranks=3, microbatches=4), 3)
    found = without_ranks(whole, [4], candidates=1)
    assert found.schedule.num_microbatches == 12
    moved = []
    for microbatch in range(12):
        before = [whole.placement.rank_of(stage, microbatch) for stage in range(3)]
        after = [found.schedule.placement.rank_of(stage, microbatch) for stage in range(3)]
        after = [rank + (rank >= 4) for rank in after]
        if before != after:
            moved.append(after[1])
            assert (before[1], after) == (4, [before[0], after[1], before[2]])
    assert sorted(moved) == [1, 1, 7, 7]


def test_a_slower_microbatch_counts_for_more_where_lost_ones_are_divided() -> None:
    whole = replicated(make_schedule("1f1b", ranks=1, microbatches=2), 3)
    cost = CostModel((1,), (1,), (1,), microbatch_factors=(1, 2, 1, 1, 2, 1))
    found = without_ranks(whole, [0], cost=cost, candidates=1)
    assert [found.schedule.placement.rank_of(0, microbatch) for microbatch in (0, 3)] == [1, 1]


def test_several_ranks_may_fail_and_chunks_move_alone() -> None:
    whole = replicated(make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=2), 3)
    found = without_ranks(whole, [0, 3], candidates=20)
    assert len(found.schedule.rows) == 4
    assert not verify(found.schedule)


def test_replicas_do_what_the_schedule_does() -> None:
    for name in ("1f1b", "dualpipe", "zb-v"):
        one = make_schedule(name, ranks=2, microbatches=4)
        several = replicated(one, 3)
        assert not verify(several)
        timeline, cost = simulate(several, CostModel.even(one.placement)), CostModel.even(one.placement)
        assert timeline.makespan == simulate(one, cost).makespan
        assert timeline.peak_activations == simulate(one, cost).peak_activations * 3


def test_what_cannot_go_on_is_refused() -> None:
    whole = replicated(make_schedule("1f1b", ranks=2, microbatches=2), 2)
    with pytest.raises(UsageError, match="no rank is left that holds stage 1: start again from the newest checkpoint"):
        without_ranks(whole, [1, 3])
    with pytest.raises(UsageError, match="there is no rank 4: schedule '1f1b' has ranks 0 to 3"):
        without_ranks(whole, [4])
    with pytest.raises(UsageError, match=r"has actions of kind C.*without\(Kind.C\)"):
        without_ranks(with_recompute(whole), [1])
    with pytest.raises(UsageError, match="dead must be a list of whole numbers"):
        without_ranks(whole, ["1"])  # type: ignore[list-item] # refused, too, where nobody checks types
    sliced = replicated(make_schedule("1f1b", ranks=2, microbatches=2, slices=2), 2)
    with pytest.raises(UsageError, match="cannot take slices"):
        without_ranks(sliced, [1])


def test_reductions_are_left_to_the_engine() -> None:
    whole = replicated(make_schedule("1f1b", ranks=2, microbatches=2), 2).with_reductions()
    found: Schedule = without_ranks(whole, [1], candidates=1).schedule
    assert Kind.R not in found.kinds
    assert not verify(found.with_reductions())
