"""A schedule is recognised by its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow.core.action import Action, Entry, Pair
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.schedules.registry import is_searched, recognised
from tests.families import make_near

FAMILIES = [name for name in SCHEDULES if not is_searched(name) and name != "seq1f1b"]  # which is 1f1b


def renumbered(schedule: Schedule, numbers: list[int]) -> Schedule:
    def action(each: Action) -> Action:
        return replace(each, microbatch=numbers[each.microbatch])

    def entry(each: Entry) -> Entry:
        return action(each) if isinstance(each, Action) else Pair(action(each.forward), action(each.backward))

    return replace(schedule, rows=tuple(tuple(map(entry, row)) for row in schedule.rows))


@pytest.mark.some(6)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=5)
@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 9))
def test_every_family_is_recognised_also_with_reductions(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_near(name, ranks=ranks, microbatches=microbatches)
    assert name in recognised(schedule)
    assert name in recognised(schedule.with_reductions())


@pytest.mark.parametrize("name", FAMILIES)
def test_microbatches_of_one_path_may_change_their_numbers(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6)
    assert name in recognised(renumbered(schedule, [4, 5, 0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("interleaved-1f1b", {"chunks": 3}),
        ("interleaved-1f1b", {"chunks": 3, "extra_warmup": 2}),
        ("hanayo", {"waves": 2}),
        ("gis", {"group": 8}),
    ],
)
def test_options_that_a_schedule_needs_stand_behind_its_name(name: str, options: dict[str, int]) -> None:
    said = ", ".join(f"{option}={value}" for option, value in options.items())
    assert f"{name} with {said}" in recognised(make_schedule(name, ranks=4, microbatches=8, **options))


@pytest.mark.parametrize("name", FAMILIES)
def test_other_rows_have_other_names(name: str) -> None:
    """Whatever a schedule is recognised as has its rows, and rows that no family has are not recognised."""
    schedule = make_schedule(name, ranks=4, microbatches=6)
    for rank, row in enumerate(schedule.rows):
        rows = [*schedule.rows]
        rows[rank] = (*row[:-2], row[-1], row[-2])
        assert name not in recognised(replace(schedule, rows=tuple(rows)))
        rows[rank] = row[:-1]
        assert recognised(replace(schedule, rows=tuple(rows))) == ()
