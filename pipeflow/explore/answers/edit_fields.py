"""Start: the fields with which the reader begins to edit a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.explore.names import file_of
from pipeflow.explore.rows import custom_fields
from pipeflow.explore.schedule_cache import schedule
from pipeflow.explore.state import State
from pipeflow.schedules.registry_names import recognised


def start(fields: Mapping[str, str]) -> dict[str, Any]:
    """`fields`: what to set in the link to begin with the schedule of a state; `empty`: the same to begin with rows
    without actions for its placement and its microbatches.

    Raises UsageError for fields that are wrong, for a schedule that cannot be made, and for several schedules.
    """
    state = State.of(fields)
    if len(state.schedules) > 1:
        raise UsageError("choose one schedule to edit")
    made = schedule(state, state.schedules[0])
    recognised(made)  # takes a while for the first schedule of a size, so that the first edit does not
    begin = custom_fields(made) | {"rows_file": file_of(state.schedules[0]) or ""}
    return {"fields": begin, "empty": begin | {"rows": ""}}
