"""Theory, over every registered schedule: soundness, and the formulas that the docstrings state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow.analysis.simulate import simulate
from pipeflow.analysis.verify import verify
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule, options_of


class Size(NamedTuple):
    ranks: int
    microbatches: int
    chunks: int  # 1 for a schedule without chunks


class Theory(NamedTuple):
    """`bubble` is the longest idle time, in whole-stage costs; `peak` is in chunk activations."""

    bubble: Callable[[Size, float], float]
    peak: Callable[[Size, int], int]
    holds: Callable[[Size], bool] = lambda _: True


THEORY: dict[str, Theory] = {
    "gpipe": Theory(
        bubble=lambda size, cost: (size.ranks - 1) * cost,
        peak=lambda size, _: size.microbatches,
    ),
    "1f1b": Theory(
        bubble=lambda size, cost: (size.ranks - 1) * cost,
        peak=lambda size, rank: min(size.ranks - rank, size.microbatches),
    ),
    "eager-1f1b": Theory(
        bubble=lambda size, cost: (size.ranks - 1) * cost,
        peak=lambda size, rank: min(2 * (size.ranks - rank) - 1, size.microbatches),
    ),
    "looped-bfs": Theory(
        bubble=lambda size, cost: (size.ranks - 1) * cost / size.chunks,
        peak=lambda size, _: size.microbatches * size.chunks,
        holds=lambda size: size.microbatches >= size.ranks,
    ),
    "interleaved-1f1b": Theory(
        bubble=lambda size, cost: (size.ranks - 1) * cost / size.chunks,
        peak=lambda size, rank: min(
            2 * (size.ranks - rank - 1) + (size.chunks - 1) * size.ranks + 1, size.microbatches * size.chunks
        ),
        holds=lambda size: size.microbatches % size.ranks == 0,
    ),
}


def make(name: str, size: Size) -> Schedule:
    options = {"chunks": size.chunks} if "chunks" in options_of(name) else {}
    return make_schedule(name, ranks=size.ranks, microbatches=size.microbatches, **options)


def sizes(name: str, ranks: int, microbatches: int, chunks: int) -> st.SearchStrategy[Size]:
    chunked = "chunks" in options_of(name)
    return st.builds(
        Size, st.integers(1, ranks), st.integers(1, microbatches), st.integers(1, chunks) if chunked else st.just(1)
    )


def small(name: str) -> Iterator[Size]:
    for ranks in range(1, 5):
        for microbatches in range(1, 10):
            for chunks in range(1, 4) if "chunks" in options_of(name) else (1,):
                yield Size(ranks, microbatches, chunks)


names = pytest.mark.parametrize("name", SCHEDULES)


def test_every_schedule_has_its_theory() -> None:
    assert set(THEORY) == set(SCHEDULES)


@names
def test_every_small_size_is_sound(name: str, require_sound: Callable[[Schedule], None]) -> None:
    for size in small(name):
        require_sound(make(name, size))


@names
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_large_sizes_are_sound(name: str, require_sound: Callable[[Schedule], None], data: st.DataObject) -> None:
    require_sound(make(name, data.draw(sizes(name, 16, 64, 4))))


times = st.integers(1, 5)


@names
@settings(max_examples=25, deadline=None)
@given(data=st.data(), forward=times, backward_input=times, backward_weight=times)
def test_bubble_and_peak_are_those_of_the_docstring(
    name: str, data: st.DataObject, forward: int, backward_input: int, backward_weight: int
) -> None:
    size = data.draw(sizes(name, 8, 16, 4).map(lambda size: fitting(name, size)))
    schedule = make(name, size)
    cost = CostModel.even(schedule.placement, forward, backward_input, backward_weight)
    timeline = simulate(schedule, cost)
    whole = forward + backward_input + backward_weight
    assert timeline.work == pytest.approx(size.microbatches * whole)
    assert timeline.makespan - timeline.work == pytest.approx(THEORY[name].bubble(size, whole))
    assert timeline.bubble_ratio == pytest.approx(1 - timeline.work / timeline.span)
    peaks = [THEORY[name].peak(size, rank) / size.chunks for rank in range(size.ranks)]
    assert list(timeline.peak_activations) == pytest.approx(peaks)


def fitting(name: str, size: Size) -> Size:
    """`size`, or one as small for which the docstring makes its statement."""
    if THEORY[name].holds(size):
        return size
    return size._replace(microbatches=-(-size.microbatches // size.ranks) * size.ranks)


@names
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_forward_only_fills_and_empties_the_pipeline_once(name: str, data: st.DataObject) -> None:
    size = fitting(name, data.draw(sizes(name, 8, 16, 4)))
    schedule = make(name, size).forward_only()
    assert verify(schedule) == []
    timeline = simulate(schedule, CostModel.even(schedule.placement, forward=size.chunks))
    assert timeline.makespan == size.microbatches * size.chunks + size.ranks - 1
    assert timeline.peak_activations == (1 / size.chunks,) * size.ranks


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
        make_schedule("interleaved-1f1b", ranks=2, microbatches=2, pace=1)
    for name in SCHEDULES:
        with pytest.raises(UsageError, match="ranks must be"):
            make_schedule(name, ranks=0, microbatches=2)
        with pytest.raises(UsageError, match="microbatches must be"):
            make_schedule(name, ranks=2, microbatches=0)
    with pytest.raises(UsageError, match="chunks must be"):
        make_schedule("interleaved-1f1b", ranks=2, microbatches=2, chunks=0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [16, 32, 64])
def test_an_eager_warm_up_pays_for_transfers_once(ranks: int, microbatches: int) -> None:
    cost = 0.25
    excess = {}
    for name in ("1f1b", "eager-1f1b"):
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
        slow = simulate(schedule, CostModel.even(schedule.placement, transfer=cost)).makespan
        excess[name] = slow - simulate(schedule).makespan
    assert excess["eager-1f1b"] == pytest.approx(2 * (ranks - 1) * cost)
    assert excess["1f1b"] >= excess["eager-1f1b"]
