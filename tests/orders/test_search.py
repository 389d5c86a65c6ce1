"""The search against brute force, against a solver, and against published figures; and what it promises."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.search import PUBLISHED, Published
from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.factors import each_factor
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.schedules.order_search import exact, search
from pipeflow.schedules.orders.batch_order import large_first
from pipeflow.schedules.orders.list_scheduling import Builder, run_times
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.problem import Objective, Problem, make_problem, to_schedule, to_sequences
from pipeflow.schedules.orders.rules import plain_rules, varied
from pipeflow.schedules.zb_auto import zb_auto
from tests.families import make_near

LINEAR, VEE = Placement.linear(4), Placement.vee(4)


def random_cost(stages: int, seed: int) -> CostModel:
    draw = Random(seed)
    forward, backward_input, backward_weight = (tuple(draw.uniform(0.5, 2) for _ in range(stages)) for _ in range(3))
    return CostModel(forward, backward_input, backward_weight, latency=draw.choice((0.0, 0.2)))


def every_row(stage: int, microbatches: int) -> list[tuple[Action, ...]]:
    """Every order of a rank's actions in which F precedes I and that W; microbatches in any order."""
    labels = [microbatch for microbatch in range(microbatches) for _ in range(3)]
    rows = []
    for order in set(permutations(labels)):
        kinds = {microbatch: iter((Kind.F, Kind.I, Kind.W)) for microbatch in range(microbatches)}
        rows.append(tuple(Action(next(kinds[microbatch]), stage, microbatch) for microbatch in order))
    return rows


def with_bytes(cost: CostModel, seed: int) -> CostModel:
    """Of some stages a waiting half holds more than the forward saved, as with activation checkpointing."""
    draw = Random(seed)
    saved, deferred = (tuple(draw.uniform(1, 3) for _ in cost.forward) for _ in range(2))
    return replace(cost, saved_bytes=saved, deferred_bytes=deferred)


def with_factors(cost: CostModel, many: int, seed: int) -> CostModel:
    """Microbatches differ in times and bytes: with odd seeds, on each stage in another way."""
    draw = Random(seed)
    rows = tuple(tuple(draw.uniform(0.3, 3) for _ in range(many)) for _ in cost.forward)
    return replace(cost, microbatch_factors=rows if seed % 2 else rows[0])


def largest_factor(cost: CostModel) -> float:
    return max((factor for _, factor in each_factor(cost.microbatch_factors)), default=1)


def value(timeline: Timeline, objective: Objective) -> float:
    return timeline.span if objective == "span" else timeline.makespan


def every_timeline(ranks: int, microbatches: int, cost: CostModel) -> Iterator[Timeline]:
    """That of every schedule that runs."""
    for rows in product(*(every_row(stage, microbatches) for stage in range(ranks))):
        try:
            yield simulate(Schedule("any", Placement.linear(ranks), microbatches, rows), cost)
        except ScheduleError:
            continue


OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_of_all_orders_none_is_better_than_what_is_found(seed: int) -> None:
    ranks = 3 if seed == 1 else 2
    cost = with_bytes(random_cost(ranks, seed), seed)
    every = list(every_timeline(ranks, 2, cost))
    least = list(map(max, cost.saved_bytes, cost.deferred_bytes))
    some, most = (tuple(bytes_ * factor for bytes_ in least) for factor in (1.4, 2))
    for objective in OBJECTIVES:
        for cap in (
            {"memory_cap": 1},
            {"memory_cap": 2},
            {"bytes_cap": least},
            {"bytes_cap": some},
            {"bytes_cap": most},
        ):
            best = min(value(timeline, objective) for timeline in every if within(timeline, **cap))
            found = search(Placement.linear(ranks), 2, cost, objective=objective, **cap, candidates=500)
            assert within(found.timeline, **cap)
            assert value(found.timeline, objective) == pytest.approx(best)
            assert found.lower_bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", [4, 5, 7])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.slow
def test_no_order_of_microbatches_that_differ_is_below_the_bound(objective: Objective, seed: int) -> None:
    cost = with_factors(random_cost(2, 5), 2, seed)
    best = min(value(timeline, objective) for timeline in every_timeline(2, 2, cost))
    found = search(Placement.linear(2), 2, cost, objective=objective, candidates=100)
    assert found.lower_bound <= best * (1 + 1e-9) <= value(found.timeline, objective) * (1 + 2e-9)
    assert found.lower_bound >= 0.8 * best


def test_a_search_counts_that_microbatches_differ() -> None:
    """The best order of equal ones is longer here than an order for the three large ones."""
    large = replace(CostModel.even(LINEAR), microbatch_factors=(1, 1, 3, 0.7, 0.5, 0.5, 0.7, 3))
    alike = search(LINEAR, 8, replace(large, microbatch_factors=()), candidates=300)
    found = search(LINEAR, 8, large, candidates=300)
    assert found.timeline.makespan < 0.9 * simulate(alike.schedule, large).makespan


def one_long(factor: float, place: int, capped: bool) -> tuple[CostModel, float]:
    """Costs of 16 microbatches on 4 ranks, of which one is so many times as long as the others; and a cap in bytes."""
    factors = [1.0] * 16
    factors[place] = factor
    cost = replace(CostModel.even(LINEAR, saved_bytes=4, deferred_bytes=1), microbatch_factors=tuple(factors))
    usual = simulate(make_schedule("zb-h1", ranks=4, microbatches=16), cost)
    return cost, 1.5 * max(usual.peak_bytes) if capped else inf


@pytest.mark.parametrize("place", [0, 15])
@pytest.mark.parametrize(
    ("factor", "capped", "near"), [(8, True, 0.9), (12, True, 0.95), (16, True, 0.95), (12, False, 1)]
)
@pytest.mark.slow
def test_one_very_long_microbatch_may_be_at_any_place(factor: float, capped: bool, near: float, place: int) -> None:
    cost, cap = one_long(factor, place, capped)
    found = search(LINEAR, 16, cost, bytes_cap=cap, candidates=1000)
    assert verify(found.schedule) == []
    assert found.timeline == simulate(found.schedule, cost)
    assert max(found.timeline.peak_bytes) <= cap * (1 + 1e-9)
    assert found.lower_bound >= near * found.timeline.makespan * (1 - 1e-9)


def test_a_start_in_which_microbatches_overtake_is_kept() -> None:
    cost, _ = one_long(12, 0, capped=False)
    cost = replace(cost, microbatch_factors=((12, *(1.0,) * 15), *((1.0,) * 15 + (12,) for _ in range(3))))
    makespan, start = min(large_first(LINEAR, cost, forwards=forwards) for forwards in (True, False))
    found = search(LINEAR, 16, cost, candidates=1, start=[start])
    assert found.timeline.makespan <= makespan * (1 + 1e-9)


def within(timeline: Timeline, memory_cap: float = inf, bytes_cap: Sequence[float] | None = None) -> bool:
    peaks = timeline.peak_bytes if bytes_cap else ()
    return max(timeline.peak_activations) <= memory_cap and all(
        peak <= cap * (1 + 1e-9) for peak, cap in zip(peaks, bytes_cap or (), strict=True)
    )


@pytest.mark.parametrize(
    ("placement", "microbatches", "cap", "span"),
    [(LINEAR, 8, 4, 27), (LINEAR, 8, 7, 24), (LINEAR, 8, 1, 64 + 1), (VEE, 8, 4, 24), (VEE, 8, 3, 25)],
)
def test_what_is_known_to_be_best_at_unit_costs_is_found_and_proved(
    placement: Placement, microbatches: int, cap: int, span: float
) -> None:
    cost = CostModel.even(placement)
    found = search(placement, microbatches, cost, objective="span", memory_cap=cap, candidates=500)
    assert (found.timeline.span, found.lower_bound, found.gap) == (span, span, 0)


placements = st.one_of(
    st.builds(Placement.linear, st.integers(1, 5)),
    st.builds(Placement.looped, st.integers(1, 3), st.integers(1, 3)),
    st.builds(Placement.vee, st.integers(1, 3)),
    st.sampled_from([Placement(((0, 0, 1, 1),)), Placement(((1, 0, 2, 1, 0),)), Placement(((0, 1, 0, 0),))]),
)


@settings(max_examples=60)
@given(
    placement=placements,
    many=st.integers(1, 6),
    seed=st.integers(0, 99),
    room=st.floats(0, 3),
    in_bytes=st.booleans(),
    differ=st.booleans(),
    objective=st.sampled_from(OBJECTIVES),
)
@pytest.mark.slow
def test_every_candidate_is_sound_within_the_cap_and_above_the_bound(
    placement: Placement, many: int, seed: int, room: float, in_bytes: bool, differ: bool, objective: Objective
) -> None:
    cost, draw = with_bytes(random_cost(placement.num_stages, seed), seed), Random(seed)
    cost = with_factors(cost, many, seed) if differ else cost
    largest = largest_factor(cost)
    caps = [each * largest + draw.random() * room for each in least_caps(placement, cost, in_bytes=in_bytes)]
    capped: dict[str, Any] = {"bytes_cap" if in_bytes else "memory_cap": caps}
    problem_ = make_problem(placement, many, cost, **capped, objective=objective)
    require_sound_candidates(problem_, cost, caps, draw, in_bytes=in_bytes)


def require_sound_candidates(
    problem: Problem, cost: CostModel, caps: Sequence[float], draw: Random, *, in_bytes: bool
) -> None:
    """Candidates of some rules, drawn at random, pass `verify`, keep the caps and are no better than the bound."""
    bound = bounds(problem)
    builder = Builder.of(problem, bound)
    grid = list(plain_rules(builder.alike, builder.heads))
    some = [draw.choice([rules for rules in grid if (rules.slack is None) is direct]) for direct in (True, True, False)]
    for rules in (*some, *(varied(each, builder.alike, draw) for each in some)):
        candidate = builder.candidate(rules)
        assert candidate is not None
        schedule = to_schedule("any", problem, candidate.sequences)
        assert verify(schedule) == []
        timeline = simulate(schedule, cost)
        ran = value(timeline, problem.objective)
        assert bound.objective * (1 - 1e-9) <= ran <= candidate.objective * (1 + 1e-9)
        peaks = timeline.peak_bytes if in_bytes else timeline.peak_activations
        assert all(peak <= cap + 1e-6 for peak, cap in zip(peaks, caps, strict=True))
        assert builder.candidate(rules, candidate.objective * (1 + 1e-9)) == candidate
        stopped = builder.candidate(rules, candidate.objective * 0.9)
        assert stopped is None or stopped == candidate


def least_caps(placement: Placement, cost: CostModel, *, in_bytes: bool) -> Iterator[float]:
    """Per rank, what one microbatch needs."""
    for stages in map(placement.stages_of, range(placement.num_ranks)):
        if not in_bytes:
            yield len(stages) / placement.chunks_per_rank
            continue
        halves = [cost.deferred_bytes[stage] - cost.saved_bytes[stage] for stage in stages]
        yield sum(cost.saved_bytes[stage] for stage in stages) + max(0, *halves)


ONE_PATH = [name for name in SCHEDULES if len(make_near(name, ranks=2, microbatches=1).placement.paths) == 1]


@pytest.mark.parametrize("name", ONE_PATH)
def test_sequences_run_as_simulated(name: str) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=5)
    cost = with_factors(random_cost(schedule.placement.num_stages, 1), 5, 1)
    problem_ = make_problem(schedule.placement, 5, cost)
    sequences = to_sequences(schedule)
    times = run_times(problem_, sequences)
    assert times is not None
    timeline = simulate(to_schedule("halves", problem_, sequences), cost)
    assert times.starts == [[span.start for span in row] for row in timeline.rows]
    assert timeline.span <= simulate(schedule, cost).span * (1 + 1e-9)  # halves are never worse than whole backwards


@pytest.mark.some(11)
@pytest.mark.parametrize("name", [name for name in ONE_PATH if name != "zb-auto"])
@pytest.mark.parametrize("cap", [3, 4])
@pytest.mark.slow
def test_never_worse_than_a_start_within_the_cap(name: str, cap: float) -> None:
    start = make_schedule(name, ranks=4, microbatches=6)
    cost = random_cost(start.placement.num_stages, 2)
    before = simulate(start, cost)
    for objective in OBJECTIVES:
        found = search(start.placement, 6, cost, objective=objective, memory_cap=cap, candidates=1, start=[start])
        assert max(found.timeline.peak_activations) <= cap
        worst = value(before, objective) * (1 + 1e-9)
        assert max(before.peak_activations) > cap or value(found.timeline, objective) <= worst
        assert found.timeline == simulate(found.schedule, cost)


@settings(max_examples=60)
@given(
    shape=st.one_of(
        st.tuples(st.just("linear"), st.integers(1, 6), st.just(1)),
        st.tuples(st.just("looped"), st.integers(1, 5), st.integers(2, 4)),
        st.tuples(st.just("vee"), st.integers(1, 6), st.just(2)),
        st.tuples(st.just("waves"), st.integers(1, 4), st.just(4)),
    ),
    many=st.integers(1, 12),
    seed=st.integers(0, 99),
    even=st.booleans(),
    overlap=st.sampled_from([0.0, 0.0, 1.0]),
    exchange=st.sampled_from([0.0, 0.0, 0.4, 0.9]),
    occupied=st.booleans(),
    room=st.floats(1, 2.5),
    in_bytes=st.sampled_from([None, False, True]),
    objective=st.sampled_from(OBJECTIVES),
)
@pytest.mark.slow
def test_never_worse_than_any_named_schedule_within_the_cap(
    shape: tuple[str, int, int],
    many: int,
    seed: int,
    even: bool,
    overlap: float,
    exchange: float,
    occupied: bool,
    room: float,
    in_bytes: bool | None,
    objective: Objective,
) -> None:
    """However small the budget, and however the cap counts."""
    kind, ranks, chunks = shape
    sized = {"chunks": chunks, "waves": max(chunks // 2, 1)}
    named = {
        name: make_schedule(
            name, ranks=ranks, microbatches=many, **{each: sized[each] for each in sized if each in options_of(name)}
        )
        for name in ONE_PATH
        if name != "zb-auto"
    }
    placement = {
        "linear": Placement.linear(ranks),
        "looped": Placement.looped(ranks, chunks),
        "vee": Placement.vee(ranks),
        "waves": named["hanayo"].placement,
    }[kind]
    stages = placement.num_stages
    cost = CostModel.even(placement) if even else random_cost(stages, seed)
    cost = replace(with_bytes(cost, seed), overlap=overlap, exchange=(exchange,) * stages)
    if occupied:
        cost = replace(cost, bandwidth=2.0, activation_bytes=(1.0,) * stages)
    caps: dict[str, Any] = {}
    measure = "peak_bytes" if in_bytes else "peak_activations"
    if in_bytes is not None:
        least = least_caps(placement, cost, in_bytes=in_bytes)
        caps["bytes_cap" if in_bytes else "memory_cap"] = [room * each for each in least]

    def keeps(timeline: Timeline) -> bool:
        most = next(iter(caps.values()), [inf] * ranks)
        return all(peak <= cap * (1 + 1e-9) for peak, cap in zip(getattr(timeline, measure), most, strict=True))

    found = search(placement, many, cost, objective=objective, budget=0, **caps)
    assert keeps(found.timeline)
    assert verify(found.schedule) == []
    assert found.timeline == simulate(found.schedule, cost)
    for name, schedule in named.items():
        timeline = simulate(schedule, cost) if schedule.placement == placement else found.timeline
        if keeps(timeline):
            least_time = value(timeline, objective) * (1 + 1e-9)
            assert found.lower_bound <= value(found.timeline, objective) <= least_time, name


@pytest.mark.parametrize("hidden", [{"overlap": 1}, {"exchange": 0.4}, {"exchange": 0.5, "forward": 3}])
def test_a_bound_holds_for_pairs_that_overlap(hidden: dict[str, float]) -> None:
    cost = CostModel.even(VEE, **hidden)
    found = search(VEE, 16, cost, budget=0)
    alone = search(VEE, 16, replace(cost, overlap=0, exchange=()), budget=0)
    assert found.timeline.makespan < alone.lower_bound
    assert found.lower_bound < found.timeline.makespan


@pytest.mark.slow
def test_under_a_number_of_candidates_the_result_is_one() -> None:
    cost = random_cost(4, 3)
    one, other = (search(LINEAR, 6, cost, memory_cap=2, candidates=400) for _ in range(2))
    assert one == other
    assert one.gap >= 0
    more = search(LINEAR, 6, cost, memory_cap=2, candidates=800)
    assert more.timeline.makespan <= one.timeline.makespan


def test_what_cannot_be_searched_for_is_refused() -> None:
    cost = CostModel.even(LINEAR)
    with pytest.raises(UsageError, match=r"memory_cap 0.5 is too small: rank 2 needs at least 1, for one microbatch"):
        search(LINEAR, 4, cost, memory_cap=[4, 1, 0.5, 1])
    with pytest.raises(UsageError, match="got nan for rank 0: it needs 1 there"):
        search(VEE, 4, CostModel.even(VEE), memory_cap=float("nan"))
    with pytest.raises(UsageError, match="one for each of 4 ranks; got 2"):
        search(LINEAR, 4, cost, memory_cap=(2, 2))
    sized = CostModel.even(LINEAR, saved_bytes=40, deferred_bytes=50)
    with pytest.raises(UsageError, match=r"bytes_cap 45 is too small: rank 1 needs at least 50, for one microbatch"):
        search(LINEAR, 4, sized, bytes_cap=[50, 45, 50, 50])
    with pytest.raises(UsageError, match="bytes_cap is one number, or one for each of 4 ranks; got 1"):
        search(LINEAR, 4, sized, bytes_cap=[50])
    with pytest.raises(UsageError, match="bytes_cap needs costs with saved_bytes"):
        search(LINEAR, 4, cost, bytes_cap=100)
    with pytest.raises(UsageError, match="pass only one of them"):
        search(LINEAR, 4, sized, bytes_cap=100, memory_cap=4)
    with pytest.raises(UsageError, match="objective must be 'makespan' or 'span', got 'bubble'"):
        search(LINEAR, 4, cost, objective="bubble")  # type: ignore[arg-type] # refused, too, where nobody checks types
    with pytest.raises(UsageError, match="a search with kinds takes placements of one path"):
        search(Placement.bidirectional(4), 4, cost, memory_cap=2, kinds=["recompute"])
    with pytest.raises(UsageError, match="stage 4 has no cost"):
        search(VEE, 4, cost)
    with pytest.raises(UsageError, match="candidates must be"):
        search(LINEAR, 4, cost, candidates=0)
    with pytest.raises(UsageError, match="'gpipe' has another placement or other microbatches"):
        search(LINEAR, 4, cost, start=[make_schedule("gpipe", ranks=4, microbatches=5)])
    with pytest.raises(UsageError, match="does not run every forward and backward once"):
        search(LINEAR, 4, cost, start=[make_schedule("gpipe", ranks=4, microbatches=4).forward_only()])
    stuck = Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1", name="stuck")
    with pytest.raises(UsageError, match="'stuck' cannot run to its end"):
        search(Placement.linear(2), 2, CostModel.even(Placement.linear(2)), start=[stuck])


@pytest.mark.some(1)
@pytest.mark.parametrize("factor", [2, 1])
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in PUBLISHED[:7:6] else pytest.mark.exhaustive) for row in PUBLISHED],
    ids=lambda row: f"{row.model} {row.microbatches}",
)
@pytest.mark.slow
def test_no_worse_than_published(row: Published, factor: int) -> None:
    """ZB-1p and ZB-2p of arXiv 2401.10241 with the same costs; under the same caps, which are in bytes, and under caps
    of as many activations.
    """
    cost = CostModel.even(Placement.linear(row.ranks), *row.costs, saved_bytes=row.saved, deferred_bytes=row.deferred)
    most, published = factor * row.ranks, (row.single, row.double)[factor - 1]
    for cap in ({"memory_cap": most}, {"bytes_cap": [most * row.saved] * row.ranks}):
        timeline = simulate(zb_auto(row.ranks, row.microbatches, cost=cost, objective="span", **cap), cost)
        assert round(timeline.bubble_ratio, 4) <= published
        assert within(timeline, **cap)


@pytest.mark.some(2)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("costs", [(1, 1, 1, 0), (18.5, 18.1, 9.3, 0.6), None])
@pytest.mark.slow
def test_zb_auto_is_never_worse_than_a_named_schedule(objective: Objective, costs: tuple[float, ...] | None) -> None:
    """Than any of its placement, chunked ones with one chunk among them, within the same cap of either kind."""
    cost = random_cost(4, 4) if costs is None else CostModel.even(LINEAR, *costs)
    cost = replace(cost, saved_bytes=(3,) * 4, deferred_bytes=(2,) * 4)
    named = [
        make_schedule(name, ranks=4, microbatches=12, **{"chunks": 1} if "chunks" in options_of(name) else {})
        for name in SCHEDULES
        if name != "zb-auto"
    ]
    timelines = [simulate(schedule, cost) for schedule in named if schedule.placement == LINEAR]
    assert len(timelines) >= 5
    for cap in (
        {"memory_cap": 2},
        {"memory_cap": 4},
        {"memory_cap": 12},
        {"bytes_cap": [12.0] * 4},
        {"bytes_cap": [21.0] * 4},
    ):
        found = value(simulate(zb_auto(4, 12, cost=cost, objective=objective, **cap), cost), objective)
        for timeline in timelines:
            assert not within(timeline, **cap) or found <= value(timeline, objective) * (1 + 1e-9), timeline.name


def test_without_a_solver_exact_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"ortools", *(name for name in sys.modules if name.startswith("ortools."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install 'pipeflow-torch\[exact\]'"):
        exact(LINEAR, 2, CostModel.even(LINEAR))


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "placement", [Placement.looped(2, 2), Placement.vee(2), Placement(((0, 0, 1, 1),)), Placement(((0, 1, 0, 2, 1),))]
)
@pytest.mark.parametrize(("cap", "objective"), [(1.5, "span"), (2, "span"), (2, "makespan")])
@pytest.mark.slow
def test_the_solver_never_goes_below_the_bound_nor_above_the_search(
    placement: Placement, cap: float, objective: Objective
) -> None:
    pytest.importorskip("ortools")
    cost = random_cost(placement.num_stages, 5)
    best = exact(placement, 4, cost, objective=objective, memory_cap=cap, budget=60)
    found = search(placement, 4, cost, objective=objective, memory_cap=cap, candidates=1000)
    assert best.gap < 1e-3  # times are rounded down
    proved, searched = value(best.timeline, objective), value(found.timeline, objective)
    assert found.lower_bound <= proved * (1 + 1e-9)
    assert proved <= searched * (1 + 1e-9) <= proved * 1.05
    assert verify(best.schedule) == []
    assert max(best.timeline.peak_activations) <= cap + 1e-9


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", [LINEAR, Placement.vee(2)])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.slow
def test_the_solver_keeps_within_bytes(placement: Placement, objective: Objective) -> None:
    pytest.importorskip("ortools")
    cost = with_bytes(random_cost(placement.num_stages, 6), 6)
    caps = [1.5 * least for least in least_caps(placement, cost, in_bytes=True)]
    best = exact(placement, 4, cost, objective=objective, bytes_cap=caps, budget=60)
    found = search(placement, 4, cost, objective=objective, bytes_cap=caps, candidates=1000)
    assert best.gap < 1e-3
    assert found.lower_bound <= value(best.timeline, objective) * (1 + 1e-9)
    assert value(best.timeline, objective) <= value(found.timeline, objective) * (1 + 1e-9)
    assert within(best.timeline, bytes_cap=caps)


@pytest.mark.parametrize(
    ("costs", "cap", "span"), [((1, 1, 1, 0), 4, 27), ((1, 1, 1, 0), 7, 24), ((18, 18, 9, 1), 4, 424)]
)
@pytest.mark.slow
def test_the_solver_proves_what_is_best(costs: tuple[float, ...], cap: int, span: float) -> None:
    """The first two: CP-SAT's own optima for F, I, W and transfers of 1 and 0."""
    pytest.importorskip("ortools")
    best = exact(LINEAR, 8, CostModel.even(LINEAR, *costs), objective="span", memory_cap=cap, budget=60)
    assert (best.timeline.span, best.lower_bound) == (span, span)
