"""A search from the schedule that is shown."""

from __future__ import annotations

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.tools.explore import answers
from pipeflow.tools.explore.answers import search
from pipeflow.tools.explore.views import plan

BY_HAND = {"schedule": "custom", "placement": "0.1"}


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "1f1b", "ranks": "3", "microbatches": "5"},
        {"schedule": "dualpipe-v", "ranks": "2", "microbatches": "5", "overlap": "0"},
        {"schedule": "zb-h1", "ranks": "3", "microbatches": "6", "memory_cap": "3"},
        {"schedule": "gpipe", "ranks": "2", "microbatches": "4", "reduce": "2"},
        BY_HAND | {"rows": "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"},
        BY_HAND | {"rows": "0F0 0F1\n1F0 1B0", "forward": "2"},
        BY_HAND | {"rows": "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2", "memory_cap": "2"},
    ],
)
def test_what_is_found_is_sound_no_longer_and_what_the_answer_says(fields: dict[str, str]) -> None:
    answer = search(fields)
    own = plan(fields | (answer["fields"] or {}))
    if "custom" in own:
        assert own["custom"]["sound"]
        assert own["custom"]["bound"]["gap"] == pytest.approx(answer["gap"])
    assert own["data"]["timelines"][0]["makespan"] == answer["makespan"]
    assert answer["before"] is None or answer["makespan"] <= answer["before"]
    assert (answer["fields"] is None) == (answer["makespan"] == answer["before"])
    assert answer["bound"] <= answer["makespan"]
    assert ("proved best" in answer["text"]) == (answer["makespan"] == answer["bound"])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (BY_HAND | {"rows": "0B0 0F0\n1F0 1B0"}, "is unsound"),
        (BY_HAND | {"rows": "0F0\n1F0"}, "has no backwards"),
        ({"schedule": "gpipe", "ranks": "2", "microbatches": "4", "memory_cap": "2"}, "more than the memory cap"),
    ],
)
def test_a_search_that_cannot_begin_with_an_order_begins_anew_and_says_why(fields: dict[str, str], why: str) -> None:
    answer = search(fields)
    assert answer["before"] is None
    assert why in answer["text"]
    assert plan(fields | answer["fields"])["custom"]["sound"]


def test_without_a_better_order_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BUDGET", 0.01)
    answer = search({"schedule": "zb-h2", "ranks": "2", "microbatches": "4"})
    assert answer["fields"] is None
    assert answer["makespan"] == answer["before"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "chimera"}, "in one direction: begin with a schedule like"),
        ({"schedule": "1f1b", "ranks": "32", "microbatches": "128"}, "use fewer microbatches"),
        ({"schedule": "1f1b,gpipe"}, "choose one schedule"),
        ({"schedule": "1f1b", "memory_cap": "0.5"}, "too small"),
    ],
)
def test_what_no_search_takes_is_one_clear_error(fields: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search(fields)
