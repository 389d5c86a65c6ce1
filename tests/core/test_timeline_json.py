from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_timeline_comes_back_as_it_was(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=5)
    cost = CostModel.even(schedule.placement, 1 / 3, 0.1, 1e-9, 0.7, saved_bytes=3, deferred_bytes=1, reduce=1 / 7)
    cost = replace(cost, unit="s")
    for timeline in (simulate(schedule, cost), simulate(schedule.with_reductions(), cost)):
        assert Timeline.from_json(timeline.to_json()) == timeline


def test_pairs_come_back() -> None:
    paired = simulate(Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1"))
    assert Timeline.from_json(paired.to_json()) == paired


def test_exchanges_come_back() -> None:
    cost = CostModel((1, 1), (1, 1), (1, 1), exchange=(0.5, 0))
    timeline = simulate(Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1"), cost)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert [span.exchange for span in timeline] == pytest.approx([0.5, 1 / 6, 1 / 3, 1, 0, 0, 0, 0])


def test_an_empty_timeline_comes_back() -> None:
    empty = Timeline("empty", simulate(make_schedule("gpipe", ranks=2, microbatches=1)).placement, ((), ()))
    assert Timeline.from_json(empty.to_json()) == empty


def test_a_span_is_a_line_that_people_can_read() -> None:
    text = simulate(make_schedule("gpipe", ranks=2, microbatches=1)).to_json()
    assert '   ["0B0", 4.0, 6.0]' in text.splitlines()[7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": None}, "rows: None is not a list"),
        ({"rows": [[]]}, "rows: there are 1 for a placement on 2 ranks"),
        ({"rows": [[], 3]}, "rank 1: 3 is not a list"),
        ({"rows": [[["0F0", 0]], []]}, "rank 0, span 0: ['0F0', 0] is not a span"),
        ({"rows": [[["0F0", 0, 1, "", 1.1]], []]}, "rank 0, span 0: 0F0 takes 1.0, so its exchange cannot be 1.1"),
        ({"rows": [[["0F0", 0, 1, "", -0.1]], []]}, "rank 0, span 0: 0F0 takes 1.0, so its exchange cannot be -0.1"),
        ({"rows": [[["0F0", 0, 1], ["0Z0", 1, 2]], []]}, "rank 0, span 1: '0Z0' is not an action"),
        ({"rows": [[], [["0F0", 0, 1]]]}, "rank 1, span 0: 0F0 cannot run here: the rank holds stage 1"),
        ({"rows": [[["9F0", 0, 1]], []]}, "rank 0, span 0: 9F0 cannot run here"),
        ({"rows": [[["0F0", 2, 1]], []]}, "rank 0, span 0: 0F0 ends at 1.0, before its start at 2.0"),
        ({"rows": [[["0F0", 0, "1"]], []]}, "rank 0, span 0: a time must be a finite number, got '1'"),
        ({"rows": [[["0F0", 0, float("inf")]], []]}, "rank 0, span 0: a time must be a finite number, got inf"),
        ({"rows": [[["0F0", 3, 4], ["0F1", 2, 5]], []]}, "rank 0, span 1: 0F1 starts before 0F0"),
        ({"paths": [[0, "a"]]}, "the ranks of a path must be a list of whole numbers, got 'a'"),
        ({"paths": [[0, 2]]}, "must cover ranks 0..R-1 without a gap"),
        ({"saved_bytes": [1]}, "saved_bytes: there are 1 for 2 stages"),
        ({"deferred_bytes": [1, -1]}, "deferred_bytes must not be negative"),
        ({"rows": [[["1R0", 0, 1]], []]}, "rank 0, span 0: 1R0 cannot run here"),
        ({"rows": [[["0B0", 3, 4], ["0R0", 2, 5]], []]}, "rank 0, span 1: 0R0 starts before 0B0"),
        ({"reductions": [[], []]}, "a timeline has no field reductions"),
        ({"kept_bytes": 3}, "kept_bytes: 3 is not an object"),
        ({"kept_bytes": {"gold": []}}, "kept_bytes: there is no content gold; known: "),
        ({"kept_bytes": {"saved": [1]}}, "saved: there are 1 for 2 stages"),
        ({"unit": "ms"}, "the unit is 's' (seconds) or '' (not known), got 'ms': convert the times to seconds"),
        ({"colour": 1}, "a timeline has no field colour"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_its_place(change: dict[str, Any], message: str) -> None:
    sound = {"name": "sound", "paths": [[0, 1]], "rows": [[], []]}
    Timeline.from_json(json.dumps(sound))
    with pytest.raises(UsageError) as raised:
        Timeline.from_json(json.dumps(sound | change))
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"rows": []}', "0F0,0B0", "[" * 100_000])
def test_what_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="this is not"):
        Timeline.from_json(text)
