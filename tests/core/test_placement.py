from __future__ import annotations

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule


def test_constructors() -> None:
    assert Placement.linear(3).paths == ((0, 1, 2),)
    assert Placement.looped(2, 3).paths == ((0, 1, 0, 1, 0, 1),)
    assert Placement.vee(3).paths == ((0, 1, 2, 2, 1, 0),)
    assert Placement.zigzag(2, 2).paths == ((0, 1, 1, 0, 0, 1, 1, 0),)
    assert Placement.bidirectional(3).paths == ((0, 1, 2), (2, 1, 0))


@pytest.mark.parametrize(
    "placement",
    [
        Placement.linear(5),
        Placement.looped(4, 3),
        Placement.vee(4),
        Placement.zigzag(4, 3),
        Placement.bidirectional(4),
    ],
)
def test_stages_ranks_and_chunks_agree(placement: Placement) -> None:
    for microbatch in range(len(placement.paths)):
        for stage in range(placement.num_stages):
            rank = placement.rank_of(stage, microbatch)
            assert placement.stages_of(rank)[placement.chunk_of(stage, microbatch)] == stage
    visits = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    assert placement.chunks_per_rank * placement.num_ranks == len(visits)


def test_a_vee_holds_the_first_and_the_last_stage_on_rank_0() -> None:
    placement = Placement.vee(4)
    assert placement.stages_of(0) == (0, 7)
    assert placement.stages_of(3) == (3, 4)
    assert placement.chunk_of(7) == 1


def test_a_bidirectional_microbatch_picks_its_path() -> None:
    placement = Placement.bidirectional(4)
    assert [placement.rank_of(0, microbatch) for microbatch in range(4)] == [0, 3, 0, 3]
    assert placement.stages_of(1) == (1, 2)
    assert placement.chunk_of(2, microbatch=1) == 1
    assert placement.ranks_of(0) == placement.ranks_of(3) == (0, 3)
    assert Placement.vee(2).ranks_of(3) == (0,)


@pytest.mark.parametrize(
    "paths",
    [((0, 1, 2), (1, 2, 0), (2, 0, 1)), ((0, 1), (1, 0), (0, 0)), ((0, 1, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0))],
    ids=str,
)
def test_a_table_says_how_many_paths_there_are(paths: tuple[tuple[int, ...], ...]) -> None:
    placement = Placement(paths)
    actions = [
        Action(Kind.F, stage, microbatch) for microbatch in range(2 * len(paths)) for stage in range(len(paths[0]))
    ]
    rows = tuple(
        tuple(action for action in actions if placement.rank_of(action.stage, action.microbatch) == rank)
        for rank in range(placement.num_ranks)
    )
    assert Schedule.from_csv(Schedule("paths", placement, 2 * len(paths), rows).to_csv()).placement == placement


def test_one_microbatch_elsewhere_is_no_path_of_its_own() -> None:
    with pytest.raises(ScheduleError, match="microbatch m is in line m modulo n"):
        Schedule.from_csv("0F0,0F1,0F2,0F3,1F3,2F0\n1F0,1F1,1F2,2F3,2F1,2F2")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "at least one path"),
        (((),), "at least one stage"),
        (((0, 1), (1, 0, 1)), "same number of stages"),
        (((0, 2),), "without a gap"),
        (((1, 2),), "without a gap"),
        (((0, -1),), "without a gap"),
    ],
)
def test_what_cannot_be_placed_is_refused(paths: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Placement(paths)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "4", None])
def test_ranks_are_positive_integers(ranks: object) -> None:
    for constructor in (Placement.linear, Placement.vee, Placement.bidirectional):
        with pytest.raises(UsageError, match="ranks must be an integer of at least 1"):
            constructor(ranks)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="chunks must be an integer of at least 1"):
        Placement.looped(2, ranks)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="waves must be an integer of at least 1"):
        Placement.zigzag(2, ranks)  # type: ignore[arg-type]
