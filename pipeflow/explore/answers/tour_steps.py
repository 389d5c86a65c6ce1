"""Tour: which steps of the tour are reached by what a state shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeflow.explore.schedule_cache import timeline
from pipeflow.explore.state import State
from pipeflow.explore.tour import reached


def tour(fields: Mapping[str, str]) -> dict[str, Any]:
    """The numbers of the steps that are reached. Raises UsageError as `plan` does."""
    state = State.of(fields)
    return {"reached": reached(state, tuple(timeline(state, name) for name in state.schedules))}
