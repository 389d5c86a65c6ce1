"""Beside: how the timelines that stand side by side differ from the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeflow.analysis.difference import moved_actions
from pipeflow.analysis.measures import Measures
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.draw.columns import MeasureChange, changes
from pipeflow.draw.page.tables import table
from pipeflow.draw.times import Unit

Moved = tuple[frozenset[Any], ...] | None


def beside(schedules: Sequence[Schedule], drawn: Sequence[Timeline], unit: Unit) -> dict[str, Any]:
    """The differences of the timelines from the first one.

    `moved` has per timeline and rank the actions that stand at another place of their row, with blanks between, and
    None per timeline whose rows cannot be compared. `differences` is a table of measures as HTML; empty if there is one
    timeline alone.
    """
    first, *others = schedules
    moved = [moved_actions(first, other) for other in others]
    texts = [each and [" ".join(sorted(map(str, actions))) for actions in each] for each in moved]
    return {"moved": [None, *texts], "differences": _table(schedules, drawn, moved, unit) if others else ""}


def _table(schedules: Sequence[Schedule], drawn: Sequence[Timeline], moved: Sequence[Moved], unit: Unit) -> str:
    measures = [Measures.of(*each) for each in zip(schedules, drawn, strict=True)]
    found = [changes(measures[0], other, unit) for other in measures[1:]]
    titles = dict.fromkeys(title for each in found for title in each)
    before = {title: change.before for each in found for title, change in each.items()}
    rows = [[title, before[title], *(_cell(each.get(title)) for each in found)] for title in titles]
    rows.append(["actions at another place", "", *map(_count, moved, drawn[1:])])
    head = ["", *(timeline.name for timeline in drawn)]
    return table(f"Compared with {drawn[0].name}", head, rows)


def _cell(change: MeasureChange | None) -> str:
    if change is None:
        return ""
    if not change.part:
        return f"{change.after} ({change.change})"
    return f"{change.after} ({change.change}, {change.part})"


def _count(moved: Moved, timeline: Timeline) -> str:
    if moved is None:
        return "stages are placed differently"
    return f"{sum(map(len, moved))} of {sum(map(len, timeline.rows))}"
