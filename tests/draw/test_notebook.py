from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from pipeflow import Schedule, make_schedule, simulate
from pipeflow.draw import Gantt, svg


def test_a_notebook_shows_timelines_and_schedules_as_pictures() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    assert simulate(schedule)._repr_html_() == schedule._repr_html_() == svg(simulate(schedule))
    in_ms: dict[str, Any] = {"unit": "ms", "factor": 1000.0}
    assert Gantt(simulate(schedule), **in_ms)._repr_html_() == svg(simulate(schedule), **in_ms)


def test_what_cannot_run_is_shown_as_text() -> None:
    assert Schedule.from_csv("0B0,0F0")._repr_html_() is None


def test_rules_of_a_picture_are_for_it_alone() -> None:
    """Pages show several, beside other things."""
    root = ElementTree.fromstring(svg(simulate(make_schedule("1f1b", ranks=2, microbatches=2))))
    style = root.findtext("{http://www.w3.org/2000/svg}style") or ""
    rules = re.sub("@media [^{]*{", "", style).split("}")
    selectors = [selector for rule in rules for selector in rule.partition("{")[0].split(",") if selector]
    assert selectors
    assert all(selector.startswith(".pipeflow") for selector in selectors)
    assert not [element for element in root.iter() if element.get("id")]
