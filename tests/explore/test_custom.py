"""A schedule that the reader builds: whatever is done to its rows, it is drawn, and what is said about it is true."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings

from pipeflow.core.action import actions_of, parse_entry
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.dataflow import makes, needs
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.tools.explore.answers import start
from pipeflow.tools.explore.fields import placement_text
from pipeflow.tools.explore.views import plan
from tests.explore.edits import EDITS, Edit, Rows, edited

FAMILIES = [name for name in SCHEDULES if name not in ("zb-auto", "seq1f1b")]  # the latter is 1f1b here


def fields_of(rows: Rows, placement: Placement, microbatches: int, **more: str) -> dict[str, str]:
    return {
        "schedule": "custom",
        "rows": "\n".join(",".join(row) for row in rows),
        "placement": placement_text(placement),
        "rows_microbatches": str(microbatches),
        **more,
    }


def schedule_of(rows: Rows, placement: Placement, microbatches: int) -> Schedule:
    entries = tuple(tuple(map(parse_entry, row)) for row in rows)
    highest = max((each.microbatch for row in entries for entry in row for each in actions_of(entry)), default=0)
    return Schedule("custom", placement, max(microbatches, highest + 1), entries)


def told(rows: Rows, placement: Placement, microbatches: int, **more: str) -> dict[str, Any]:
    answer = plan(fields_of(rows, placement, microbatches, **more))
    json.dumps(answer)
    custom: dict[str, Any] = answer["custom"]
    return custom | {"drawn": answer["data"]["timelines"][-1]}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25)
@given(edits=EDITS)
def test_all_that_is_said_is_true_after_any_edits(name: str, edits: list[Edit]) -> None:
    base = make_schedule(name, ranks=4, microbatches=6)
    rows = edited(base, edits)
    made = schedule_of(rows, base.placement, 6)
    custom = told(rows, base.placement, 6, memory_cap="3", latency="0.5")
    assert custom["entries"] == rows
    _require_violations(custom, made)
    _require_drawn(custom, made)
    _require_waits(custom, made)
    _require_cycle(custom, made)
    _require_missing(custom, made)


def _require_violations(custom: dict[str, Any], made: Schedule) -> None:
    expected = verify(made, memory_cap=3)
    assert [(each["rank"], each["position"]) for each in custom["violations"]] == [
        (each.rank, each.position) for each in expected
    ]
    assert custom["sound"] == (not expected)
    assert all(len(each["sentence"]) > 10 for each in custom["violations"])


def _require_drawn(custom: dict[str, Any], made: Schedule) -> None:
    """Every action is drawn once, at the place that is said to be its."""
    for rank, row in enumerate(made.rows):
        drawn = custom["drawn"]["rows"][rank]["actions"].split()
        places = custom["places"][rank]
        assert Counter(places) == Counter({at: len(actions_of(entry)) for at, entry in enumerate(row)})
        for action, place in zip(drawn, places, strict=True):
            assert action in map(str, actions_of(row[place]))


def _require_waits(custom: dict[str, Any], made: Schedule) -> None:
    """A rank is stuck at the first entry that cannot run, and the waits name its place."""
    assert [each["rank"] for each in custom["waits"]] == [
        rank for rank, block in enumerate(custom["stuck"]) if block is not None
    ]
    for wait in custom["waits"]:
        rank, position = wait["rank"], wait["position"]
        block = custom["stuck"][rank]
        assert custom["places"][rank][block] == position
        assert all(place < position for place in custom["places"][rank][:block])
        for who in (wait["maker"], *custom["cycle"]):
            assert who is None or str(made.rows[who["rank"]][who["position"]]) == who["text"]
    try:
        simulate(made)
    except ScheduleError:
        assert custom["waits"]
    else:
        assert not custom["waits"]


def _require_cycle(custom: dict[str, Any], made: Schedule) -> None:
    """Each entry of a cycle would have to come before the next: it stands before it in a row, or makes what that needs.
    The cycle is there whenever `verify` finds a deadlock, and is the one that it names.
    """
    places = [(each["rank"], each["position"]) for each in custom["cycle"]]
    chains = [each.cycle for each in verify(made) if each.cycle]
    assert not chains or places == list(chains[0])
    stages = made.placement.num_stages
    for before, after in zip(places, places[1:] + places[:1], strict=True):
        made_there = {value for each in actions_of(made.rows[before[0]][before[1]]) for value in makes(each, stages)}
        needed = {value for each in actions_of(made.rows[after[0]][after[1]]) for value in needs(each, stages)}
        in_row = before[0] == after[0] and before[1] < after[1]
        assert in_row or made_there & needed


def _require_missing(custom: dict[str, Any], made: Schedule) -> None:
    """With the missing actions in the rows of their ranks, no stage lacks any work."""
    rows = [list(row) for row in made.rows]
    for each in custom["missing"]:
        action = parse_entry(each["text"])
        assert all(action not in actions_of(entry) for row in rows for entry in row)
        rows[each["rank"]].append(action)
    whole = Schedule("whole", made.placement, made.num_microbatches, tuple(map(tuple, rows)))
    lacking = {each.incomplete for each in verify(made) if each.incomplete}
    surplus = {each.incomplete for each in verify(whole) if each.incomplete}
    assert surplus <= lacking
    for stage, microbatch in surplus:  # it has more than one form of a backward
        actions = (action for row in made.rows for entry in row for action in actions_of(entry))
        kinds = {each.kind for each in actions if (each.stage, each.microbatch) == (stage, microbatch)}
        assert {"B", "I"} <= kinds or {"B", "W"} <= kinds


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_started_from_a_name_is_that_schedule(name: str) -> None:
    fields = {"schedule": name, "ranks": "4", "microbatches": "6", "latency": "0.5"}
    begun = fields | start(fields)["fields"]
    own, named = plan(begun), plan(fields)
    assert name in own["custom"]["same_as"]
    assert own["custom"]["sound"]
    assert own["data"]["timelines"] == named["data"]["timelines"]


def test_a_start_from_nothing_offers_every_action() -> None:
    fields = {"schedule": "1f1b", "ranks": "2", "microbatches": "3"}
    custom = plan(fields | start(fields)["empty"])["custom"]
    assert custom["entries"] == [[], []]
    assert {each["text"] for each in custom["missing"]} == {f"{s}{k}{m}" for s in "01" for k in "FB" for m in "012"}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["0B0 0F0", "1F0 1B0"], "0B0 needs the gradient of 1B0, which rank 1 runs later, at position 1"),
        (["0F0 0B0", "1B0 1F0"], "1B0 needs what 1F0 saves, which this rank runs later, at position 1"),
        (["0B0", "1F0 1B0"], "1F0 needs the activation of 0F0, which is missing on rank 0"),
        (["0F0 1B0", "1F0"], "1B0 cannot run on rank 0: rank 1 holds its stage"),
        (["0F0 0B0", "1F0 1F0 1B0"], "1F0 needs the activation of 0F0, which is used up already"),
        (["0F0 5B0", "1F0"], "5B0 does not exist: there are stages 0 to 1"),
    ],
)
def test_a_rank_that_waits_says_for_what(rows: list[str], sentence: str) -> None:
    custom = told([row.split() for row in rows], Placement.linear(2), 1)
    assert sentence in [each["sentence"] for each in custom["waits"]]


def test_a_schedule_has_the_names_of_all_that_equal_it_also_with_other_numbers_of_microbatches() -> None:
    rows = [[str(entry) for entry in row] for row in make_schedule("gpipe", ranks=3, microbatches=4).rows]
    swapped = [[entry[:-1] + "2031"[int(entry[-1])] for entry in row] for row in rows]
    for each in (rows, swapped):
        assert {"gpipe", "looped-bfs with chunks=1"} <= {*told(each, Placement.linear(3), 4)["same_as"]}
    swapped[0][:2] = reversed(swapped[0][:2])
    assert told(swapped, Placement.linear(3), 4)["same_as"] == ()


def test_the_bound_is_the_work_that_no_order_can_avoid() -> None:
    custom = told([["0F0", "0B0", "0F1", "0B1"]], Placement.linear(1), 2)
    assert custom["bound"]["makespan"] == 6
    assert custom["bound"]["gap"] == 0
    rows = make_schedule("gpipe", ranks=2, microbatches=1)
    bound = told(edited(rows, []), rows.placement, 1)["bound"]
    assert (bound["makespan"], bound["gap"]) == (5, pytest.approx(6 / 5 - 1))


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("dualpipe-v", {"overlap": "0.5"}, "pairs that overlap"),
        ("1f1b", {"memory_cap": "0.5"}, "too small"),
    ],
)
def test_without_a_bound_there_is_a_reason(name: str, more: dict[str, str], why: str) -> None:
    base = make_schedule(name, ranks=4, microbatches=6)
    custom = told(edited(base, []), base.placement, 6, **more)
    assert custom["bound"] is None
    assert why in custom["bound_text"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": "0F0\n1F0\n0F1", "placement": "0.1"}, "3 rows for a placement on 2 ranks"),
        ({"rows": "0F0\n0F1 1F900", "placement": "0.1"}, "901 microbatches are too many"),
        ({"rows": "0F0\n0F1 1G0", "placement": "0.1"}, r"line 2 \(rank 1\), cell 2"),
        ({"rows": "0F0\n\n0F1"}, "blank"),
    ],
)
def test_rows_that_cannot_be_read_are_one_clear_error(fields: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan({"schedule": "custom", **fields})
