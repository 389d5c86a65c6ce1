from __future__ import annotations

import re

import pytest

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.schedule import Schedule
from pipeflow.draw import picture
from pipeflow.schedules import SCHEDULES, make_schedule


def test_halves_and_idle_time() -> None:
    assert picture(simulate(Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1"))) == (
        "rank 0  F0 F1 .  .  I0 W0 I1 W1\n"
        "rank 1  .  F0 B0--- F1 I1 W1 ."
    )  # fmt: skip


def test_columns_grow_with_the_longest_number() -> None:
    lines = picture(simulate(make_schedule("gpipe", ranks=1, microbatches=11))).splitlines()
    assert lines[0].startswith("rank 0  F0- F1- F2- ")
    assert lines[0].endswith(" F9- F10 B0----- B1----- B2----- B3----- B4----- B5----- B6----- B7----- B8----- B9-----"
                             " B10----")  # fmt: skip


def test_labels_line_up_with_many_ranks() -> None:
    lines = picture(simulate(make_schedule("1f1b", ranks=11, microbatches=1))).splitlines()
    assert lines[9].startswith("rank 9   .  .  .  .  .  .  .  .  .  F0 ")
    assert lines[10].startswith("rank 10  .  .  .  .  .  .  .  .  .  .  F0 B0--- ")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_is_the_schedule(name: str) -> None:
    """Whatever the unit of time, the letters and numbers of a line are the actions of the rank, in order."""
    schedule = make_schedule(name, ranks=4, microbatches=4)
    for cost in (CostModel.even(schedule.placement), CostModel.even(schedule.placement, 0.3, 0.3, 0.3)):
        lines = picture(simulate(schedule, cost)).splitlines()
        for rank, line in enumerate(lines):
            shown = [word.strip("-").upper() for word in line.split()[2:] if word != "."]
            assert shown == [f"{action.kind.value}{action.microbatch}" for action in schedule.actions(rank)]


def test_a_docstring_has_the_picture_of_4_ranks() -> None:
    for name, generator in SCHEDULES.items():
        text = generator.__doc__ or ""
        shown = re.search(rf"{generator.__name__}\(4, (\d+)(?:, slices=(\d+))?", text)
        assert shown, name
        cut = {"slices": int(shown[2])} if shown[2] else {}
        drawn = picture(simulate(make_schedule(name, ranks=4, microbatches=int(shown[1]), **cut)))
        assert all(line in text for line in drawn.splitlines())
