"""Published values and op strings (the zero-bubble and Megatron-LM papers and their code), at unit costs."""

from __future__ import annotations

from itertools import accumulate

import pytest

from pipeflow.core.action import Kind
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import make_schedule


def unit_passes(name: str, ranks: int, microbatches: int, **options: int) -> Timeline:
    """A pass through one chunk takes 1."""
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, **options)
    passes = schedule.placement.chunks_per_rank
    return simulate(schedule, CostModel.even(schedule.placement, passes, passes, passes))


@pytest.mark.parametrize(
    ("name", "chunks", "microbatches", "makespan", "peaks"),
    [
        ("gpipe", None, 8, 33, [8, 8, 8, 8]),
        ("gpipe", None, 12, 45, [12, 12, 12, 12]),
        ("1f1b", None, 8, 33, [4, 3, 2, 1]),
        ("1f1b", None, 12, 45, [4, 3, 2, 1]),
        ("interleaved-1f1b", 2, 8, 57, [11, 9, 7, 5]),
        ("interleaved-1f1b", 2, 12, 81, [11, 9, 7, 5]),
        ("interleaved-1f1b", 4, 8, 105, [19, 17, 15, 13]),
        ("interleaved-1f1b", 4, 12, 153, [19, 17, 15, 13]),
    ],
)
def test_four_ranks(name: str, chunks: int | None, microbatches: int, makespan: int, peaks: list[int]) -> None:
    options = {} if chunks is None else {"chunks": chunks}
    schedule = make_schedule(name, ranks=4, microbatches=microbatches, **options)
    passes = chunks or 1  # a pass through one chunk takes 1
    timeline = simulate(schedule, CostModel.even(schedule.placement, passes, passes, passes))
    assert timeline.makespan == timeline.span == makespan
    assert timeline.work == 3 * microbatches * passes
    assert [peak * passes for peak in timeline.peak_activations] == peaks


def test_1f1b_of_4_ranks_and_4_microbatches() -> None:
    row = make_schedule("1f1b", ranks=4, microbatches=4).rows[1]
    assert " ".join(map(str, row)) == "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"


def test_interleaved_of_2_ranks_and_4_microbatches() -> None:
    rows = make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=2).rows
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize(
    ("name", "microbatches", "makespan", "span", "peaks"),
    [
        ("zb-h1", 8, 27, 27, [4, 3, 2, 1]),
        ("zb-h1", 12, 39, 39, [4, 3, 2, 1]),
        ("zb-h2", 8, 27, 24, [7, 5, 3, 1]),
        ("zb-h2", 12, 39, 36, [7, 5, 3, 1]),
        ("zb-v", 8, 51, 48, [8, 8, 8, 8]),
        ("zb-v", 12, 75, 72, [8, 8, 8, 8]),
    ],
)
def test_zero_bubble_of_four_ranks(name: str, microbatches: int, makespan: int, span: int, peaks: list[int]) -> None:
    timeline = unit_passes(name, 4, microbatches)
    assert (timeline.makespan, timeline.span) == (makespan, span)
    assert [peak * timeline.placement.chunks_per_rank for peak in timeline.peak_activations] == peaks


@pytest.mark.parametrize(("microbatches", "span"), [(4, 30), (6, 38)])
def test_zb_v_of_few_microbatches(microbatches: int, span: int) -> None:
    assert unit_passes("zb-v", 4, microbatches).span == span


@pytest.mark.parametrize(
    ("name", "ranks", "bubble", "peak"),
    [
        ("v-half", 4, 5, 6),
        ("v-half", 6, 11, 8),
        ("v-half", 8, 17, 10),
        ("v-half", 16, 41, 18),
        ("v-min", 4, 11, 4),
        ("v-min", 6, 17, 6),
        ("v-min", 8, 27, 8),
        ("v-min", 16, 59, 12),
    ],
)
def test_controllable_memory_is_no_worse_than_published(name: str, ranks: int, bubble: int, peak: int) -> None:
    """In passes: the span's bubble (1F1B: 6(R-1)), and the peak in chunk activations (1F1B: 2R)."""
    timeline = unit_passes(name, ranks, 3 * ranks)
    assert timeline.span - timeline.work <= bubble
    assert {2 * alive for alive in timeline.peak_activations} == {peak}


@pytest.mark.parametrize(("name", "peak"), [("v-half", 10), ("v-min", 8)])
def test_what_waiting_weight_gradients_hold_is_one_activation_more(name: str, peak: int) -> None:
    """When half of an activation is kept from I to W. Of 8 ranks."""
    change = {Kind.F: 1.0, Kind.I: -0.5, Kind.W: -0.5}
    schedule = make_schedule(name, ranks=8, microbatches=24)
    for rank in range(8):
        assert max(accumulate(change[action.kind] for action in schedule.actions(rank))) <= peak + 1


def test_zb_h1_of_3_ranks_and_4_microbatches() -> None:
    rows = make_schedule("zb-h1", ranks=3, microbatches=4).rows
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_v_of_2_ranks_and_4_microbatches() -> None:
    rows = make_schedule("zb-v", ranks=2, microbatches=4).rows
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ]


@pytest.mark.parametrize(
    ("group", "makespan", "peaks"),
    [
        (4, 81, [11, 9, 7, 5]),
        (6, 81, [13, 11, 9, 7]),
        (12, 81, [19, 17, 15, 13]),
    ],
)
def test_groups_of_interleaved_1f1b(group: int, makespan: int, peaks: list[int]) -> None:
    timeline = unit_passes("interleaved-1f1b", 4, 12, group=group)
    assert timeline.makespan == makespan
    assert [2 * peak for peak in timeline.peak_activations] == peaks


def test_a_last_group_that_is_filled_up_is_no_worse_than_a_smaller_one() -> None:
    """Groups of 6 and 2 take 62 where the last two microbatches are a group of their own (Megatron-core), not 57."""
    assert unit_passes("interleaved-1f1b", 4, 8, group=6).makespan == 61
    assert unit_passes("interleaved-1f1b", 4, 8).makespan == 57


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "makespan", "when_apart", "peak"),
    [
        ("dualpipe-v", 4, 8, 54, 51, 9),
        ("dualpipe-v", 4, 12, 78, 75, 9),
        ("dualpipe", 8, 20, 66, 63, 9),
    ],
)
def test_dualpipe(name: str, ranks: int, microbatches: int, makespan: int, when_apart: int, peak: int) -> None:
    """`when_apart`: when the forward of a pair runs before its backward, and is seen as soon as it has."""
    timeline = unit_passes(name, ranks, microbatches)
    assert timeline.makespan == timeline.span == makespan
    assert {alive * timeline.placement.chunks_per_rank for alive in timeline.peak_activations} == {peak}
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches).without_pairs()
    passes = schedule.placement.chunks_per_rank
    assert simulate(schedule, CostModel.even(schedule.placement, passes, passes, passes)).makespan == when_apart


def test_dualpipe_v_of_2_ranks_and_4_microbatches() -> None:
    rows = make_schedule("dualpipe-v", ranks=2, microbatches=4).rows
    assert [" ".join(str(entry).removesuffix("OVERLAP_F_B") for entry in row) for row in rows] == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


@pytest.mark.parametrize(("ranks", "backward", "ratio"), [(4, 1, 0.2), (8, 1, 0.2727), (4, 2, 0.25), (8, 2, 0.3333)])
def test_chimera_of_one_unit(ranks: int, backward: float, ratio: float) -> None:
    """As many microbatches as ranks: (R-2)/(2R+R-2) at B = F, (R-2)/(1.5R+R-2) at B = 2F (arXiv 2107.06925)."""
    schedule = make_schedule("chimera", ranks=ranks, microbatches=ranks)
    timeline = simulate(schedule, CostModel.even(schedule.placement, 1, backward / 2, backward / 2))
    assert timeline.bubble_ratio == pytest.approx(ratio, abs=1e-4)


@pytest.mark.parametrize(
    ("ranks", "waves", "ratio"),
    [(4, 1, 0.333), (4, 2, 0.213), (4, 4, 0.119), (8, 1, 0.368), (8, 2, 0.238), (8, 4, 0.135)],
)
def test_hanayo_is_no_worse_than_a_list_schedule(ranks: int, waves: int, ratio: float) -> None:
    """`ratio` is that of a run at B = 2F in which whoever is free takes a backward before a forward, for M = R."""
    schedule = make_schedule("hanayo", ranks=ranks, microbatches=ranks, waves=waves)
    assert simulate(schedule).bubble_ratio < ratio + 5e-4
