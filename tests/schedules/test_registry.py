"""Theory, over every registered schedule: soundness, and the formulas that the docstrings state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.schedules.families import schedules_on
from pipeflow.schedules.registry import COMPARED, is_searched
from tests.families import accepts


class Size(NamedTuple):
    ranks: int
    microbatches: int
    chunks: int  # stages a microbatch visits on a rank: 1 for a schedule without chunks


class Costs(NamedTuple):
    """Of one microbatch on one rank's whole share of the model."""

    forward: int
    backward_input: int
    backward_weight: int

    @property
    def whole(self) -> int:
        return sum(self)


def equal(costs: Costs) -> Costs:
    return Costs(costs.forward, costs.forward, costs.forward)


def small_weight(costs: Costs) -> Costs:
    """W is no longer than F, and than I."""
    return costs._replace(backward_weight=min(costs))


class Theory(NamedTuple):
    """`bubble` is the longest idle time, from the start of the step and, `own`, from each rank's own start, where
    that is less; `peak` is in chunk activations; `fill` is the idle time, in passes, of the forwards alone.
    """

    bubble: Callable[[Size, Costs], float]
    peak: Callable[[Size, int], int]
    holds: Callable[[Size], bool] = lambda _: True
    costs: Callable[[Costs], Costs] = lambda costs: costs  # the nearest ones for which `bubble` holds
    own: Callable[[Size, Costs], float] | None = None
    at_most: bool = False  # `bubble` is a bound
    peak_at_most: bool = False  # `peak` is a bound
    fill: Callable[[Size], int] | None = lambda size: size.ranks - 1
    chunks: int = 1  # of a schedule without an option for it


def gap_less(size: Size, _: Costs) -> float:
    return 0


def early_gradients(size: Size, costs: Costs) -> float:
    return (size.ranks - 1) * (costs.forward + costs.backward_input) / size.chunks


def weight_filled(size: Size, costs: Costs) -> float:
    return early_gradients(size, costs) - (size.ranks - 1) * costs.backward_weight / size.chunks


def v_half_passes(size: Size, costs: Costs) -> float:
    return 3 * (size.ranks - 3) * costs.forward / 2


def v_min_passes(size: Size, costs: Costs) -> float:
    return (4 * size.ranks - (5 if size.ranks % 3 else 7)) * costs.forward / 2


def half_group(size: Size) -> int:
    return -(-size.ranks // 2)


def crossing(depth: int, size: Size, costs: Costs) -> float:
    """The bubble of waves that cross on ranks that have a place near both ends of a pipeline of `depth` stages."""
    units, gap = size.microbatches // size.ranks, costs.whole - 2 * costs.forward
    return (depth - 2) * (costs.whole - costs.forward + (units - 1) * gap) / size.chunks


def no_short_backward(costs: Costs) -> Costs:
    """A whole backward is no shorter than a forward."""
    return costs._replace(backward_weight=max(costs.backward_weight, costs.forward - costs.backward_input))


THEORY: dict[str, Theory] = {
    "gpipe": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.whole,
        peak=lambda size, _: size.microbatches,
    ),
    "naive": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * size.microbatches * costs.whole,
        peak=lambda size, _: 1,
    ),
    "1f1b": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.whole,
        peak=lambda size, rank: min(size.ranks - rank, size.microbatches),
    ),
    "seq1f1b": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.whole,
        peak=lambda size, rank: min(size.ranks - rank, size.microbatches),
    ),
    "eager-1f1b": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.whole,
        peak=lambda size, rank: min(2 * (size.ranks - rank) - 1, size.microbatches),
    ),
    "looped-bfs": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.whole / size.chunks,
        peak=lambda size, _: size.microbatches * size.chunks,
        holds=lambda size: size.microbatches >= size.ranks,
    ),
    "interleaved-1f1b": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.whole / size.chunks,
        peak=lambda size, rank: min(
            2 * (size.ranks - rank - 1) + (size.chunks - 1) * size.ranks + 1, size.microbatches * size.chunks
        ),
        holds=lambda size: size.microbatches % size.ranks == 0,
    ),
    "zb-h1": Theory(
        bubble=weight_filled,
        peak=lambda size, rank: min(size.ranks - rank, size.microbatches),
        holds=lambda size: size.microbatches >= size.ranks,
        costs=small_weight,
    ),
    "zb-h2": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.forward,
        own=gap_less,
        peak=lambda size, rank: 2 * (size.ranks - rank) - 1,
        holds=lambda size: size.microbatches >= 2 * size.ranks - 1,
        costs=equal,
    ),
    "zb-v": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.forward / 2,
        own=gap_less,
        peak=lambda size, _: 2 * size.ranks,
        holds=lambda size: size.microbatches >= 2 * size.ranks - 1,
        costs=equal,
        fill=lambda size: 2 * (size.ranks - 1),
        chunks=2,
    ),
    "v-half": Theory(
        bubble=v_half_passes,
        peak=lambda size, _: size.ranks + 2,
        holds=lambda size: size.ranks >= 6 and size.microbatches >= 2 * size.ranks,
        costs=equal,
        fill=None,
        chunks=2,
    ),
    "v-min": Theory(
        bubble=v_min_passes,
        peak=lambda size, _: 2 * ((size.ranks + 4) // 3),
        holds=lambda size: size.ranks > 1 and size.microbatches >= 2 * size.ranks,
        costs=equal,
        at_most=True,
        fill=None,
        chunks=2,
    ),
    "interleaved-zb": Theory(
        bubble=weight_filled,
        peak=lambda size, rank: size.ranks * size.chunks - rank,
        holds=lambda size: size.microbatches % size.ranks == 0,
        costs=small_weight,
    ),
    "gis": Theory(
        bubble=early_gradients,
        peak=lambda size, rank: size.ranks * size.chunks - rank,
        holds=lambda size: size.microbatches % size.ranks == 0,
    ),
    "gis-h": Theory(
        bubble=lambda size, costs: (
            early_gradients(size, costs)
            + (size.ranks - half_group(size)) * (size.chunks - 1) * costs.forward / size.chunks
        ),
        peak=lambda size, rank: min(
            half_group(size) * (size.chunks - 1) + size.ranks - rank, size.microbatches * size.chunks
        ),
        holds=lambda size: size.microbatches % half_group(size) == 0,
        costs=equal,
        fill=None,
    ),
    "chimera": Theory(
        bubble=lambda size, costs: crossing(size.ranks, size, costs),
        peak=lambda size, rank: size.ranks // 2 + 1 + min(rank, size.ranks - 1 - rank),
        holds=lambda size: size.microbatches % size.ranks == 0,
        costs=no_short_backward,
        fill=None,
    ),
    "hanayo": Theory(
        bubble=lambda size, costs: crossing(2 * size.ranks, size, costs),
        peak=lambda size, rank: (size.chunks - 1) * size.ranks + rank + 1,
        holds=lambda size: size.microbatches % size.ranks == 0,
        costs=no_short_backward,
        fill=None,
    ),
    "dualpipe": Theory(
        bubble=lambda size, costs: (size.ranks - 2) * costs.forward,
        peak=lambda size, _: size.ranks + 1,
        holds=lambda size: size.microbatches % 2 == 0 and size.microbatches >= 2 * size.ranks,
        costs=equal,
        fill=None,
    ),
    "dualpipe-v": Theory(
        bubble=lambda size, costs: (size.ranks - 1) * costs.forward,
        peak=lambda size, _: 2 * size.ranks + 1,
        holds=lambda size: size.microbatches >= 2 * size.ranks,
        costs=equal,
        fill=None,
        chunks=2,
    ),
    "zb-auto": Theory(
        bubble=weight_filled,
        at_most=True,
        peak=lambda size, _: size.ranks,
        peak_at_most=True,
        holds=lambda size: size.microbatches >= size.ranks,
        costs=equal,
    ),
}


def make(name: str, size: Size) -> Schedule:
    options = {"chunks": size.chunks, "waves": size.chunks // 2}
    known = {option: value for option, value in options.items() if option in options_of(name)}
    return make_schedule(name, ranks=size.ranks, microbatches=size.microbatches, **known)


def ranks_up_to(name: str, most: int) -> list[int]:
    return [ranks for ranks in range(1, most + 1) if accepts(name, ranks)]


def chunks_up_to(name: str, most: int) -> list[int]:
    if "waves" in options_of(name):
        return list(range(2, most + 1, 2))
    return list(range(1, most + 1)) if "chunks" in options_of(name) else [THEORY[name].chunks]


@cache
def sizes(name: str, ranks: int, microbatches: int, chunks: int) -> st.SearchStrategy[Size]:
    numbers = (st.sampled_from(ranks_up_to(name, ranks)), st.integers(1, microbatches))
    return st.builds(Size, *numbers, st.sampled_from(chunks_up_to(name, chunks)))


def small(name: str) -> Iterator[Size]:
    for ranks in ranks_up_to(name, 4):
        for microbatches in range(1, 10):
            for chunks in chunks_up_to(name, 4 if "waves" in options_of(name) else 3):
                yield Size(ranks, microbatches, chunks)


names = pytest.mark.parametrize("name", SCHEDULES)


def test_every_schedule_has_its_theory() -> None:
    assert set(THEORY) == set(SCHEDULES)


@names
@pytest.mark.slow
def test_every_small_size_is_sound(name: str, require_sound: Callable[[Schedule], None]) -> None:
    for size in small(name):
        require_sound(make(name, size))


@pytest.mark.some(5)
@names
@settings(max_examples=6)
@given(data=st.data())
@pytest.mark.slow
def test_large_sizes_are_sound(name: str, require_sound: Callable[[Schedule], None], data: st.DataObject) -> None:
    require_sound(make(name, data.draw(sizes(name, 16, 64, 4))))


times = st.integers(1, 5)


@names
@settings(max_examples=25)
@given(data=st.data(), drawn=st.builds(Costs, times, times, times))
@pytest.mark.slow
def test_bubble_and_peak_are_those_of_the_docstring(name: str, data: st.DataObject, drawn: Costs) -> None:
    theory = THEORY[name]
    size = data.draw(sizes(name, 16, 16, 4).map(lambda size: fitting(name, size)))
    costs = theory.costs(drawn)
    schedule = make(name, size)
    timeline = simulate(schedule, CostModel.even(schedule.placement, *costs))
    assert timeline.work == pytest.approx(size.microbatches * costs.whole)
    bubble = timeline.makespan - timeline.work
    assert bubble == pytest.approx(theory.bubble(size, costs)) or (
        theory.at_most and bubble < theory.bubble(size, costs)
    )
    if theory.own is not None:
        assert timeline.span - timeline.work == pytest.approx(theory.own(size, costs))
    assert timeline.bubble_ratio == pytest.approx(1 - timeline.work / timeline.span)
    peaks = [theory.peak(size, rank) / size.chunks for rank in range(size.ranks)]
    if theory.peak_at_most:
        peaks = [min(ends) for ends in zip(peaks, timeline.peak_activations, strict=True)]
    assert list(timeline.peak_activations) == pytest.approx(peaks)
    require_that_forwards_fill_and_empty_the_pipeline_once(schedule.forward_only(), size, theory.fill)


def require_that_forwards_fill_and_empty_the_pipeline_once(
    schedule: Schedule, size: Size, fill: Callable[[Size], int] | None
) -> None:
    timeline = simulate(schedule, CostModel.even(schedule.placement, forward=size.chunks))
    if fill is not None:
        assert timeline.makespan == size.microbatches * size.chunks + fill(size)
    assert timeline.peak_activations == (1 / size.chunks,) * size.ranks


def fitting(name: str, size: Size) -> Size:
    """`size`, or the next larger one for which the docstring makes its statement."""
    for ranks in (number for number in count(size.ranks) if accepts(name, number)):
        for microbatches in range(size.microbatches, size.microbatches + 2 * ranks + 1):
            if THEORY[name].holds(fits := size._replace(ranks=ranks, microbatches=microbatches)):
                return fits
    raise AssertionError


@pytest.mark.parametrize("placement", [Placement.linear(4), Placement.looped(4, 2), Placement.vee(4)], ids=str)
def test_schedules_are_found_for_ranks_in_any_order(placement: Placement) -> None:
    turn = (2, 0, 3, 1)
    usual = {each.name: each for each in schedules_on(placement, 5)}
    other = {each.name: each for each in schedules_on(placement.with_ranks(turn), 5)}
    assert usual.keys() == other.keys()
    for name, schedule in other.items():
        assert schedule.placement == placement.with_ranks(turn)
        for rank, its in enumerate(turn):
            assert schedule.rows[its] == usual[name].rows[rank]


def test_a_naive_pipeline_uses_one_rank_at_a_time() -> None:
    """Others are never worse, and it is not among those that are compared or searched from."""
    schedule = make_schedule("naive", ranks=4, microbatches=5)
    timeline = simulate(schedule, CostModel.even(schedule.placement))
    spans = sorted((span.start, span.end) for span in timeline)
    assert all(after >= before for (_, before), (after, _) in pairwise(spans))
    assert timeline.work / timeline.makespan == pytest.approx(1 / 4)
    assert tuple(name for name in SCHEDULES if name not in ("naive", "seq1f1b")) == COMPARED
    assert "naive" not in {each.name for each in schedules_on(schedule.placement, 5)}
    for name in COMPARED:
        if accepts(name, 4) and not is_searched(name):
            other = make_schedule(name, ranks=4, microbatches=5)
            assert simulate(other, CostModel.even(other.placement)).makespan < timeline.makespan


@names
def test_a_faster_transfer_is_never_slower(name: str) -> None:
    schedule = make(name, Size(4, 8, 2))
    makespans = [simulate(schedule, CostModel.even(schedule.placement, transfer=c)).makespan for c in (0, 0.25, 1)]
    assert makespans == sorted(makespans)
    assert makespans[0] < makespans[-1]


@names
def test_the_first_line_of_a_docstring_is_one_sentence(name: str) -> None:
    summary = (SCHEDULES[name].__doc__ or "").partition("\n")[0]
    assert summary.endswith(".")
    assert len(summary) <= 80


def test_unknown_names_and_options_and_numbers_below_1_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown schedule '1fib'; did you mean '1f1b'"):
        make_schedule("1fib", ranks=2, microbatches=2)
    with pytest.raises(UsageError, match="known: gpipe, 1f1b"):
        make_schedule("?", ranks=2, microbatches=2)
    with pytest.raises(UsageError, match="does not take chunks, pace; it has no options"):
        make_schedule("gpipe", ranks=2, microbatches=2, pace=1, chunks=2)
    with pytest.raises(UsageError, match="does not take pace; its options are chunks"):
        make_schedule("looped-bfs", ranks=2, microbatches=2, pace=1)
    for name in SCHEDULES:
        with pytest.raises(UsageError, match="ranks must be"):
            make_schedule(name, ranks=0, microbatches=2)
        with pytest.raises(UsageError, match="microbatches must be"):
            make_schedule(name, ranks=2, microbatches=0)
        for option in options_of(name):
            with pytest.raises(UsageError, match=f"{option} (must be|needs costs|-1 is too small)"):
                make_schedule(name, ranks=2, microbatches=2, **{option: -1})
    for name in ("chimera", "dualpipe"):
        with pytest.raises(UsageError, match="two directions and needs an even number of ranks, got 3"):
            make_schedule(name, ranks=3, microbatches=2)
    for name, least in (("interleaved-1f1b", 4), ("gis", 2)):
        with pytest.raises(UsageError, match=f"group must be an integer of at least {least}, got {least - 1}"):
            make_schedule(name, ranks=4, microbatches=4, group=least - 1)
