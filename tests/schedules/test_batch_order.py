"""Orders of batches whose samples have different lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from math import inf
from random import Random

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.schedules.order_search import order_for
from pipeflow.schedules.orders.batch_order import BatchOrder, Rerun, _bound, balanced_groups, large_first, padded_groups
from pipeflow.schedules.orders.lower_bounds import largest_microbatch
from pipeflow.schedules.orders.problem import make_problem
from tests.families import make_near

LINEAR = Placement.linear(4)


def long_tailed(samples: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [min(4096, max(8, int(draw.lognormvariate(5.3, 1.1)))) for _ in range(samples)]


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_like_cost_hold_every_sample_once(seed: int) -> None:
    lengths = long_tailed(64, seed)
    groups = balanced_groups(lengths, 16)
    assert sorted(index for group in groups for index in group) == list(range(64))
    sums = [sum(lengths[index] for index in group) for group in groups]
    least = max(max(lengths), sum(lengths) / 16)  # no division has a smaller largest sum
    assert max(sums) <= 4 / 3 * least
    assert min(map(len, balanced_groups([0.0] * 5, 5))) == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rerun_takes_as_long_as_a_simulation(name: str) -> None:
    schedule = make_near(name, ranks=4, microbatches=6)
    cost = replace(CostModel.even(schedule.placement, 0.7, 1.3, 0.4, transfer=0.2, exchange=0.3), overlap=0.5)
    if not name.startswith("dualpipe"):  # whose pairs send two values at once, so that one waits for the link
        cost = replace(cost, activation_bytes=(0.005,) * schedule.placement.num_stages, bandwidth=1.0)
    rerun, draw = Rerun(schedule, cost), Random(1)
    for _ in range(3):
        factors = tuple(tuple(draw.uniform(0.3, 3) for _ in range(6)) for _ in cost.forward)
        assert rerun.makespan(factors) == pytest.approx(
            simulate(schedule, replace(cost, microbatch_factors=factors)).makespan
        )
    assert rerun.kept / schedule.placement.chunks_per_rank == max(simulate(schedule, cost).peak_activations)


def factors_of(found: BatchOrder, costs: list[float]) -> list[float]:
    sums = [sum(costs[index] for index in group) for group in found.groups]
    return [each * len(sums) / sum(sums) for each in sums]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize("quadratic", [0.0, 1e-3])
def test_an_order_is_sound_and_better_than_equal_counts(name: str, quadratic: float) -> None:
    usual = make_schedule(name, ranks=4, microbatches=16)
    cost, lengths = CostModel.even(usual.placement), long_tailed(128, 1)
    found = order_for(lengths, usual.placement, cost, 16, quadratic=quadratic)
    costs = [length + quadratic * length**2 for length in lengths]
    assert sorted(index for group in found.groups for index in group) == list(range(128))
    assert found.cost.microbatch_factors == pytest.approx(factors_of(found, costs))
    assert not verify(found.schedule)
    assert found.timeline == simulate(found.schedule, found.cost)
    counts = [sum(costs[8 * index : 8 * index + 8]) for index in range(16)]
    equal = replace(cost, microbatch_factors=tuple(16 * each / sum(counts) for each in counts))
    assert found.timeline.makespan < 0.95 * simulate(usual, equal).makespan


@pytest.mark.parametrize("seed", range(3))
def test_an_order_is_near_the_bound(seed: int) -> None:
    """Also with transfers, and with one sample that is longer than a mean microbatch."""
    cost = CostModel.even(LINEAR, transfer=0.05)
    lengths = [*long_tailed(127, seed), 6000]
    found = order_for(lengths, LINEAR, cost, 16)
    assert found.lower_bound >= 0.9 * found.timeline.makespan
    assert max(found.cost.factors[0]) > 1.5


@pytest.mark.parametrize(("longest", "near"), [(6000, 0.93), (20_000, 0.86)])
@pytest.mark.parametrize(
    "placement", [LINEAR, Placement.linear(8), Placement.looped(4, 2), Placement.bidirectional(4)], ids=str
)
def test_an_order_is_near_the_bound_with_one_very_long_text(placement: Placement, longest: int, near: float) -> None:
    cost = CostModel.even(placement)
    found = order_for([*long_tailed(127, 0), longest], placement, cost, 16)
    assert verify(found.schedule) == []
    assert found.lower_bound >= near * found.timeline.makespan
    cost = replace(cost, saved_bytes=(1.0,) * placement.num_stages)
    cap = 0.9 * max(simulate(found.schedule, replace(found.cost, saved_bytes=cost.saved_bytes)).peak_bytes)
    within = order_for([*long_tailed(127, 0), longest], placement, cost, 16, bytes_cap=cap)
    assert max(within.timeline.peak_bytes) <= cap * (1 + 1e-9)


@pytest.mark.parametrize("forwards", [True, False])
@pytest.mark.parametrize("placement", [Placement.zigzag(3, 1), Placement.bidirectional(4)], ids=str)
def test_large_first_says_the_makespan_of_its_schedule(placement: Placement, forwards: bool) -> None:
    bytes_ = (0.01,) * placement.num_stages
    cost = replace(CostModel.even(placement, 1, 2, 0.5, transfer=0.1), activation_bytes=bytes_, bandwidth=1.0)
    cost = replace(cost, microbatch_factors=(0.5, 0.7, 1, 3, 0.6, 0.2))
    makespan, schedule = large_first(placement, cost, forwards=forwards)
    assert verify(schedule) == []
    assert makespan == pytest.approx(simulate(schedule, cost).makespan)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 1.5), (0.1, 1.9), (1.9, 0.1)])
@pytest.mark.parametrize("times", [(1, 0.8), (0.3, 2)])
def test_no_order_ends_before_the_bound_of_the_largest_microbatch(
    times: tuple[float, float], factors: tuple[float, float]
) -> None:
    """All orders of two stages and two microbatches, which may overtake each other."""
    placement = Placement.linear(2)
    cost = replace(CostModel.even(placement, *times, 0.7), microbatch_factors=factors)
    chains = [[Action(kind, 0, microbatch) for kind in (Kind.F, Kind.I, Kind.W)] for microbatch in range(2)]
    rows = []
    for places in combinations(range(6), 3):
        left = [iter(chain) for chain in chains]
        rows.append([next(left[place not in places]) for place in range(6)])
    makespans = []
    for one, other in product(rows, rows):
        last = tuple(Action(action.kind, 1, action.microbatch) for action in other)
        schedule = Schedule("", placement, 2, (tuple(one), last))
        if not verify(schedule):
            makespans.append(simulate(schedule, cost).makespan)
    durations = [cost.duration(kind, stage) for stage in range(2) for kind in (Kind.F, Kind.I, Kind.W)]
    bound = largest_microbatch([[time * factor for factor in factors] for time in durations], 1)
    assert bound <= min(makespans) * (1 + 1e-9)
    if max(factors) == 1.9:
        assert bound == pytest.approx(min(makespans), rel=0.02)


def test_large_microbatches_are_in_the_middle_where_others_would_wait_for_them() -> None:
    lengths = [100, 100, 100, 100, 100, 100, 250, 250]
    found = order_for(lengths, LINEAR, CostModel.even(LINEAR), 8)
    large = [place for place, [sample] in enumerate(found.groups) if sample >= 6]
    assert 0 < min(large) <= max(large) < 7


def test_what_every_rank_finds_is_the_same() -> None:
    """The budget is no time: a search runs here, and it depends on the arguments alone."""
    lengths, cost = [*long_tailed(60, 3), 9000], CostModel.even(LINEAR, saved_bytes=4, deferred_bytes=1)
    one, other = (order_for(lengths, LINEAR, cost, 12, bytes_cap=20, budget=0.05) for _ in range(2))
    assert one == other
    assert one.schedule.name == "for lengths"
    better = order_for(lengths, LINEAR, cost, 12, bytes_cap=20, budget=1.0)
    assert better.timeline.makespan <= one.timeline.makespan


@pytest.mark.parametrize("cap", [8.5, 12, 16])
def test_a_cap_in_bytes_is_kept(cap: float) -> None:
    cost = CostModel.even(LINEAR, saved_bytes=4, deferred_bytes=1)
    lengths = long_tailed(64, 2)
    found = order_for(lengths, LINEAR, cost, 8, bytes_cap=cap)
    assert max(found.timeline.peak_bytes) <= cap * (1 + 1e-9)
    assert found.timeline.makespan >= order_for(lengths, LINEAR, cost, 8).timeline.makespan * 0.99


def test_a_placement_without_a_named_schedule_is_searched() -> None:
    placement = Placement(((0, 0, 1, 1),))
    found = order_for(long_tailed(32, 1), placement, CostModel.even(placement), 8)
    assert not verify(found.schedule)
    assert found.lower_bound >= 0.9 * found.timeline.makespan


def test_only_schedules_that_are_given_are_chosen_from() -> None:
    lengths, cost = long_tailed(64, 1), CostModel.even(LINEAR)
    usual = make_schedule("1f1b", ranks=4, microbatches=8)
    found = order_for(lengths, LINEAR, cost, 8, among=[usual])
    assert found.schedule is usual
    assert found.timeline.makespan > order_for(lengths, LINEAR, cost, 8).timeline.makespan
    with pytest.raises(UsageError, match="'1f1b' has another placement or other microbatches than the batch"):
        order_for(lengths, LINEAR, cost, 9, among=[usual])
    with pytest.raises(UsageError, match="among has no schedule"):
        order_for(lengths, LINEAR, cost, 8, among=[])


@pytest.mark.parametrize("seed", range(4))
def test_padded_samples_of_like_length_come_together(seed: int) -> None:
    lengths = long_tailed(64, seed)
    found = order_for(lengths, LINEAR, CostModel.even(LINEAR), 16, padded=True)
    assert sorted(index for group in found.groups for index in group) == list(range(64))
    areas = [len(group) * max(lengths[index] for index in group) for group in found.groups]
    assert found.cost.microbatch_factors == pytest.approx([16 * area / sum(areas) for area in areas])
    packed = order_for(lengths, LINEAR, CostModel.even(LINEAR), 16)
    wasteful = [len(group) * max(lengths[index] for index in group) for group in packed.groups]
    assert sum(areas) < 0.8 * sum(wasteful)
    assert max(areas) < 0.8 * max(wasteful)


@pytest.mark.parametrize("padded", [False, True])
def test_lengths_may_differ_by_stage(padded: bool) -> None:
    """Images cost on the first stage alone, and few samples have any."""
    draw, tokens = Random(1), long_tailed(64, 3)
    images = [draw.choice((0, 0, 0, 5)) for _ in range(64)]
    lengths, cost = [images, tokens, tokens, tokens], CostModel.even(LINEAR)
    found = order_for(lengths, LINEAR, cost, 8, padded=padded)
    rows = []
    for row in (images, tokens):
        each = [[row[sample] for sample in group] for group in found.groups]
        sums = [max(own) * len(own) if padded else sum(own) for own in each]
        rows.append([8 * one / sum(sums) for one in sums])
    assert found.cost.factors[0] == pytest.approx(rows[0])
    assert found.cost.factors[1:] == tuple(pytest.approx(rows[1]) for _ in range(3))
    assert sorted(index for group in found.groups for index in group) == list(range(64))
    assert found.timeline == simulate(found.schedule, found.cost)
    assert found.lower_bound >= (0.7 if padded else 0.9) * found.timeline.makespan
    assert order_for([tokens] * 4, LINEAR, cost, 8, padded=padded).timeline.makespan == pytest.approx(
        order_for(tokens, LINEAR, cost, 8, padded=padded).timeline.makespan
    )


@pytest.mark.parametrize("place", [0, 15])
@pytest.mark.parametrize("times", [8, 12, 16])
def test_a_long_text_within_the_memory_of_a_usual_schedule_is_near_the_bound(times: int, place: int) -> None:
    cost, lengths = CostModel.even(LINEAR, saved_bytes=4, deferred_bytes=1), [1.0] * 16
    lengths[place] = times
    usual = make_schedule("zb-h1", ranks=4, microbatches=16)
    factors = tuple(16 * length / sum(lengths) for length in lengths)
    cap = 1.5 * max(simulate(usual, replace(cost, microbatch_factors=factors)).peak_bytes)
    found = order_for(lengths, LINEAR, cost, 16, bytes_cap=cap)
    assert max(found.timeline.peak_bytes) <= cap * (1 + 1e-9)
    assert found.lower_bound >= 0.9 * found.timeline.makespan


@pytest.mark.parametrize("forwards", [True, False])
def test_large_first_keeps_a_cap_or_says_that_it_stands_still(forwards: bool) -> None:
    still = 0
    for placement, seed in product([LINEAR, Placement.looped(2, 2), Placement.looped(2, 4)], range(6)):
        draw, stages = Random(seed), placement.num_stages
        table = tuple(tuple(draw.uniform(0.5, 3) for _ in range(8)) for _ in range(stages))
        cost = replace(CostModel.even(placement, saved_bytes=4, deferred_bytes=5), microbatch_factors=table)
        cap = make_problem(placement, 8, cost, bytes_cap=inf).least
        memory = make_problem(placement, 8, cost, bytes_cap=[1.2 * least for least in cap]).memory
        makespan, schedule = large_first(placement, cost, memory, forwards=forwards)
        still += makespan == inf
        if makespan < inf:
            assert verify(schedule) == []
            peaks = simulate(schedule, cost).peak_bytes
            assert all(peak <= 1.2 * least * (1 + 1e-6) for peak, least in zip(peaks, cap, strict=True))
    assert still < 18


def test_as_many_padded_groups_as_microbatches_even_if_samples_are_alike() -> None:
    assert sorted(map(len, padded_groups([3.0] * 10, 4))) == [1, 3, 3, 3]
    assert sorted(map(len, padded_groups([5.0, 1.0, 1.0], 3))) == [1, 1, 1]


def test_of_schedules_that_take_the_same_time_the_one_that_keeps_least_is_chosen() -> None:
    cost = CostModel((1.0,), (1.0,), (1.0,))
    assert max(order_for([1, 2, 3], Placement.linear(1), cost, 3).timeline.peak_activations) < 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [1, 2]}, "a batch of 2 samples cannot fill 4 microbatches: use fewer of them"),
        ({"lengths": [1, 2, 0, 4]}, "the length of sample 2 must be positive, got 0"),
        ({"lengths": [1, 2, float("nan"), 4]}, "the length of sample 2 must be positive, got nan"),
        ({"quadratic": -1}, "quadratic must be finite and not negative, got -1"),
        ({"budget": 0}, "budget must be positive, got 0"),
        ({"microbatches": 0}, "microbatches must be"),
        ({"slices": (0, 2)}, r"slices must be whole numbers of 1 or more, such as \(1, 4\)"),
        ({"slices": 4}, r"slices must be whole numbers of 1 or more, such as \(1, 4\), got 4"),
        ({"cost": CostModel((1,), (1,), (1,))}, "stage"),
        ({"bytes_cap": 1.0}, "saved_bytes"),
        ({"lengths": [[1, 2, 3, 4]] * 3}, "lengths per stage must be 4 lists, one per stage"),
        ({"lengths": [[1, 2, 3, 4]] * 3 + [[1, 2, 3]]}, "with the length of each sample"),
        ({"lengths": [[1, 2, 3, 4]] * 3 + [[1, 2, -3, 4]]}, "the length of sample 2 must be positive, got -3"),
        ({"lengths": [[1, 2, 3, 4]] * 3 + [[0] * 4]}, "on one stage all samples have the length 0"),
    ],
)
def test_what_cannot_be_ordered_is_refused(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"lengths": [1, 2, 3, 4], "cost": CostModel.even(LINEAR), "microbatches": 4}
    with pytest.raises(UsageError, match=message):
        order_for(placement=LINEAR, **(given | change))  # type: ignore[arg-type]


def test_a_cap_that_nothing_keeps_says_the_least_that_an_order_does() -> None:
    cost = CostModel.even(LINEAR, saved_bytes=4, deferred_bytes=1)
    with pytest.raises(UsageError, match="bytes_cap 3 is too small: rank 0 needs at least 4, for one microbatch"):
        order_for([1, 1, 1, 1], LINEAR, cost, 4, bytes_cap=3)
    bidirectional = Placement.bidirectional(2)
    with pytest.raises(UsageError, match="none of the schedules keeps bytes_cap: the least cap that one keeps is"):
        order_for([1, 1, 1, 1], bidirectional, CostModel.even(bidirectional, saved_bytes=4), 4, bytes_cap=3)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("attention", [0.0, 0.5])
def test_a_rerun_of_slices_takes_as_long_as_a_simulation(name: str, attention: float) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=6, slices=3)
    even = CostModel.even(schedule.placement, saved_bytes=1)
    cost = replace(even, attention=attention, slice_ends=(2, 3, 4), latency=0.1)
    factors = (0.2, 2.0, 1.3, 1.0, 0.5, 1.0)
    timeline = simulate(schedule, replace(cost, microbatch_factors=factors))
    assert Rerun(schedule, cost).makespan(factors) == pytest.approx(timeline.makespan)
    kept = max(simulate(schedule, cost).peak_activations) * schedule.placement.chunks_per_rank
    assert Rerun(schedule, cost).kept == pytest.approx(kept)


def test_slices_of_a_very_long_text_hold_up_no_others() -> None:
    """With whole microbatches the long text passes all ranks alone, which the bound of whole microbatches says."""
    placement, lengths = Placement.linear(4), [8000, *range(100, 500, 8)]
    cost = CostModel.even(placement)
    whole = order_for(lengths, placement, cost, 8, quadratic=1e-3)
    found = order_for(lengths, placement, cost, 8, quadratic=1e-3, slices=(1, 4))
    assert found.schedule.slices == 4
    assert found.timeline.makespan < 0.6 * whole.lower_bound
    assert 0.5 < found.lower_bound / found.timeline.makespan <= 1
    squares = sum(length * length for length in lengths) * 1e-3
    assert found.cost.attention == pytest.approx(squares / (squares + sum(lengths)))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("slices", [2, 5])
def test_no_schedule_of_slices_ends_before_its_bound(name: str, slices: int) -> None:
    """It meets the bound of its work on one rank, and that of the path with one microbatch alone."""
    for ranks, lengths in product((1, 4), ([1], [1] * 6, [30, *[1] * 5])):
        schedule = make_schedule(name, ranks=ranks, microbatches=len(lengths), slices=slices)
        cost = CostModel.even(schedule.placement, 1.0, 1.2, 0.5 if len(lengths) > 1 else 0.0)
        order = order_for(lengths, schedule.placement, cost, len(lengths), among=[schedule])
        bound = _bound(schedule.placement, order.cost, slices)  # the order's own is never above its makespan
        assert 0.5 * order.timeline.makespan < bound <= order.timeline.makespan * (1 + 1e-9)
        if ranks == 1 or (name != "interleaved-1f1b" and len(lengths) == 1):
            assert bound == pytest.approx(order.timeline.makespan)


def test_a_sample_has_a_token_for_each_slice() -> None:
    placement = Placement.linear(4)
    orders = [
        order_for([900, 80, shortest], placement, CostModel.even(placement), 3, slices=(1, 4)) for shortest in (3, 4)
    ]
    assert [order.schedule.slices for order in orders] == [1, 4]
