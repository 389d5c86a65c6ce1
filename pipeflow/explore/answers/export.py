"""Export: one schedule of a state for other programs: as a table, as times, as a picture, and as code that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.draw.files.svg_timeline import svg as drawn
from pipeflow.explore.code import command, python
from pipeflow.explore.schedule_cache import schedule, timeline
from pipeflow.explore.state import State


def csv(fields: Mapping[str, str]) -> dict[str, Any]:
    """The schedule as a CSV table: `text`. Raises UsageError, as all answers of this file do, for fields that are wrong
    or name several schedules, and for a schedule that cannot be made or cannot run.
    """
    state, name = _one(fields)
    return {"text": schedule(state, name).to_csv()}


def json(fields: Mapping[str, str]) -> dict[str, Any]:
    """The timeline as JSON that `Timeline.from_json` reads: `text`."""
    return {"text": timeline(*_one(fields)).to_json()}


def svg(fields: Mapping[str, str]) -> dict[str, Any]:
    """The timeline as an SVG document: `text`."""
    state, name = _one(fields)
    return {"text": drawn(timeline(state, name), unit=state.unit.name, factor=state.unit.factor)}


def code(fields: Mapping[str, str]) -> dict[str, Any]:
    """Code that makes the timeline again: `python`, and the `command` that draws it, which is null if there is none."""
    state, name = _one(fields)
    return {"python": python(state, name), "command": command(state, name)}


def _one(fields: Mapping[str, str]) -> tuple[State, str]:
    """The state and its schedule."""
    state = State.of(fields)
    if len(state.schedules) > 1:
        raise UsageError(f"one schedule can be exported at a time, got {', '.join(state.schedules)}")
    return state, state.schedules[0]
