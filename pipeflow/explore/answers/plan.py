"""Plan: the timelines of the schedules that a state names, as the page paints them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeflow.draw.page.html import parts
from pipeflow.explore.made import timeline
from pipeflow.explore.state import State


def plan(fields: Mapping[str, str]) -> dict[str, Any]:
    """The parts of the page for the schedules of a state, and the names of the schedules.

    Raises UsageError for fields that are wrong, and for a schedule that cannot be made or cannot run.
    """
    state = State.of(fields)
    drawn = tuple(timeline(state, name) for name in state.schedules)
    return parts(drawn, state.unit)._asdict() | {"schedules": state.schedules}
