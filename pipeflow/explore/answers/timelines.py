"""Plan: the timelines of the schedules that a state names, as the page paints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeflow.core.timeline import Timeline
from pipeflow.draw.page.timeline_page import parts
from pipeflow.explore.answers.differences import beside
from pipeflow.explore.custom_schedule import custom
from pipeflow.explore.fields import CUSTOM
from pipeflow.explore.memory_fit import above_caps
from pipeflow.explore.schedule_cache import drafted, schedule, timeline
from pipeflow.explore.state import State
from pipeflow.explore.turns import TURNS


def plan(fields: Mapping[str, str]) -> dict[str, Any]:
    """The parts of the page for the schedules of a state, and what else there is to say about them:

    - schedules, own, titles: their names; the same with options of their own, and for people.
    - moved, differences: how they differ from the first one.
    - misfits: for each timeline the ranks that keep more than the memory cap, or None.
    - priced_by: the file whose measured costs are used; empty if there is none.
    - custom: the facts about the reader's own schedule, if it is among them; it is drawn also if it cannot run.

    Raises UsageError for fields that are wrong, and for a schedule that cannot be made or, if it has a name, run.
    """
    with TURNS.first():
        state = State.of(fields)
        own = custom(state) if CUSTOM in state.schedules else None
        drawn = tuple(_timeline(state, name, own) for name in state.schedules)
        cap = state.bytes_cap if drawn[0].saved_bytes else state.memory_cap
        made = [schedule(state, name) for name in state.schedules]
        names: dict[str, Any] = {"schedules": state.schedules, "own": [*map(state.with_own_options, state.schedules)]}
        names["titles"] = [each.name for each in drawn]
        priced = {"priced_by": "" if state.measured is None else state.measured.source[0]}
        shown = parts(drawn, state.unit, cap)._asdict()
        misfits = {"misfits": [above_caps(each, cap) for each in drawn]}
        answer = shown | misfits | names | beside(made, drawn, state.unit) | priced
    return answer if own is None else answer | {"custom": own}


def _timeline(state: State, name: str, own: dict[str, Any] | None) -> Timeline:
    if name != CUSTOM or own is None:
        return timeline(state, name)
    drawn = drafted(state)
    notes = [state.rows_file, "" if own["sound"] else "stuck" if drawn.stuck else "unsound"]
    said = ", ".join(filter(None, notes))
    return replace(drawn.timeline, name=f"{CUSTOM} ({said})" if said else CUSTOM)
