from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pipeflow.core.action import Action, Kind, Pair, actions_of
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.families import make_near

TWO_RANKS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 8)])
def test_a_schedule_is_read_back_from_its_csv(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_near(name, ranks=ranks, microbatches=microbatches)
    assert Schedule.from_csv(schedule.to_csv(), schedule.placement, name=name) == schedule


def test_rows_print_as_lines() -> None:
    schedule = Schedule.from_csv(TWO_RANKS)
    assert str(schedule) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    assert schedule.to_csv() == TWO_RANKS
    assert schedule.num_microbatches == 2
    assert schedule.placement == Placement.linear(2)


def test_empty_cells_blanks_and_windows_line_ends_are_skipped() -> None:
    ragged = ",0F0, 0F1,,,0B0,0B1\r\n,,1F0,1B0,1F1,1B1,,\r\n"
    assert Schedule.from_csv(ragged).rows == Schedule.from_csv(TWO_RANKS).rows


def test_pairs_and_halves_are_read() -> None:
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1")
    assert schedule.rows[0][1] == Pair(Action(Kind.F, 0, 1), Action(Kind.B, 0, 0))
    assert [str(action) for action in schedule.actions(0)] == ["0F0", "0F1", "0B0", "0I1", "0W1"]


def test_stages_are_looped_unless_a_placement_is_given() -> None:
    text = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n"
    assert Schedule.from_csv(text).placement == Placement.looped(2, 2)
    assert Schedule.from_csv(text, Placement.vee(2)).placement == Placement.vee(2)


def test_more_microbatches_than_the_file_has_can_be_given() -> None:
    assert Schedule.from_csv(TWO_RANKS, num_microbatches=3).num_microbatches == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1B0garbage\n", r"line 2 \(rank 1\), cell 2: '1B0garbage' is not an action"),
        ("0F0,,0B1B2", r"line 1 \(rank 0\), cell 3: '0B1B2' is not an action"),
        ("0F0,(0B0;0F0)OVERLAP_F_B", r"line 1 \(rank 0\), cell 2: pair .* takes a forward"),
        ("0F0;0B0", "not an action"),
        (
            "0F0,0REDUCE_GRAD,0B0",
            r"cell 2: 0REDUCE_GRAD comes before any weight gradient of its stage: put it after 0B",
        ),
        ("0F0,0B0,0REDUCE_GRAD0", "not an action"),
        ("", "empty"),
        ("  \n\n", "empty"),
        (",,\n,", "line 1 has no action"),
        ("0F0,0B0\n\n1F0,1B0\n", "^line 2 is blank: each line is the row of a rank"),
        ("\n0F0,0B0\n1F0,1B0x", r"^line 3 \(rank 1\), cell 2: '1B0x' is not an action"),
        ("0F0,1F0,2F0\n0B0,1B0,2B0", "3 stages on 2 ranks.*its lines show no other one"),
        ("0F0,0B0,0F999999999", "3 actions for 1 stages and 1000000000 microbatches"),
        ("0F0,999999999B0", "2 actions for 1000000000 stages"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (3, 5), (4, 6)])
def test_the_placement_is_read_off_the_rows(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_near(name, ranks=ranks, microbatches=microbatches)
    for each in (schedule, schedule.with_reductions()):
        read = Schedule.from_csv(each.to_csv(), name=each.name)
        ways = schedule.placement.paths[: schedule.num_microbatches]  # a single microbatch shows one path alone
        assert read == (each if ways == schedule.placement.paths else replace(each, placement=Placement(ways)))


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("1F0,1B0\n0F0,0B0", ((1, 0),)),  # any order of ranks
        ("0F0,1F0,1B0,0B0\n2F0,2B0", ((0, 0, 1),)),  # any number of stages
        ("0F0,1F1,1B1,0B0\n1F0,0F1,0B1,1B0", ((0, 1), (1, 0))),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,0B1", ((0, 1),)),  # 0B1 is on the wrong rank: looped, and unsound
        ("0F0,2F0,2B0,0B0\n3F0,3B0", ((0, 1, 0, 1),)),  # nobody runs stage 1
    ],
)
def test_rows_show_any_placement_and_looped_is_what_the_others_get(
    text: str, paths: tuple[tuple[int, ...], ...]
) -> None:
    assert Schedule.from_csv(text).placement.paths == paths


def test_a_schedule_is_described_in_one_line() -> None:
    schedule = make_schedule("zb-v", ranks=4, microbatches=64)
    assert repr(schedule) == "<Schedule 'zb-v': 4 ranks, 8 stages, 64 microbatches>"
    assert repr(simulate(schedule)) == "<Timeline 'zb-v': 4 ranks, 1536 spans, makespan 193.5>"


def test_fewer_microbatches_than_the_file_has_are_refused() -> None:
    with pytest.raises(ScheduleError, match="has 2 microbatches, not 1"):
        Schedule.from_csv(TWO_RANKS, num_microbatches=1)


def test_there_is_one_row_per_rank() -> None:
    with pytest.raises(ScheduleError, match="2 rows for a placement on 3 ranks"):
        Schedule.from_csv(TWO_RANKS, Placement.linear(3))


def test_there_is_a_microbatch() -> None:
    with pytest.raises(UsageError, match="num_microbatches must be an integer of at least 1, got 0"):
        Schedule("none", Placement.linear(1), 0, ((),))


def test_forward_only_leaves_the_forwards_in_order() -> None:
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1", name="paired")
    forward = schedule.forward_only()
    assert forward.to_csv() == "0F0,0F1\n"
    assert forward.name == "paired (forward only)"
    assert forward.is_forward_only
    assert not schedule.is_forward_only


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 5])
def test_each_rank_reduces_each_of_its_stages_after_its_last_weight_gradient(name: str, microbatches: int) -> None:
    schedule = make_near(name, ranks=3, microbatches=microbatches)
    reduced = schedule.with_reductions()
    assert verify(reduced) == []
    assert reduced.with_reductions() == reduced
    assert reduced.without_reductions() == schedule == schedule.without_reductions()
    assert reduced.forward_only() == schedule.forward_only() == schedule.forward_only().with_reductions()
    assert reduced.without_pairs() == schedule.without_pairs().with_reductions()
    assert Schedule.from_csv(reduced.to_csv(), schedule.placement, microbatches, name=schedule.name) == reduced
    for row in reduced.rows:
        for before, entry in pairwise(row):
            if isinstance(entry, Action) and entry.kind is Kind.R:
                last, (reduction,) = actions_of(before)[-1], actions_of(entry)
                assert last.kind in (Kind.B, Kind.W)
                assert (last.stage, last.microbatch) == (reduction.stage, reduction.microbatch)


def test_a_schedule_says_which_streams_it_uses() -> None:
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    assert schedule.streams == {Stream.COMPUTE}
    assert schedule.with_reductions().streams == {Stream.COMPUTE, Stream.REDUCE}


def test_a_reduction_that_is_there_stays_where_it_is() -> None:
    late = Schedule.from_csv("0F0,1F0,1B0,0B0,1R0", Placement.looped(1, 2))
    assert late.with_reductions().to_csv() == "0F0,1F0,1B0,0B0,0REDUCE_GRAD,1REDUCE_GRAD\n"


def test_reductions_are_read_with_their_microbatch_or_as_torch_writes_them() -> None:
    expected = Schedule.from_csv("0F1,0F0,0I1,0W1,(0F2;0B0)OVERLAP_F_B,0B2,0R2").rows
    assert Schedule.from_csv("0F1,0F0,0I1,0W1,(0F2;0B0)OVERLAP_F_B,0B2,0REDUCE_GRAD").rows == expected


@pytest.mark.parametrize("text", ["0F0,0R0,0B0", "0F0,0F1,0B1,0B0,0R1"])
def test_a_reduction_that_torch_would_read_as_another_is_written_out(text: str) -> None:
    assert Schedule.from_csv(text).to_csv() == f"{text}\n"


def test_schedules_are_values() -> None:
    one, other = (make_schedule("1f1b", ranks=2, microbatches=2) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.name = "another"  # type: ignore[misc]
