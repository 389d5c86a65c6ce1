"""File: whether a file that the reader opens can be shown, and in which size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.explore.names import FILE
from pipeflow.explore.state import State


def file(fields: Mapping[str, str]) -> dict[str, Any]:
    """The size of the file that a state shows, whether it is a measured timeline, and why it is unsound if it is.

    Raises UsageError for a file that cannot be shown, with the place that is wrong.
    """
    state = State.of(fields)
    if len(state.files) != 1:
        raise UsageError(f"the schedule must be {FILE}: and the name of the file")
    (found,) = state.files.values()
    return {
        "ranks": found.schedule.placement.num_ranks,
        "microbatches": found.schedule.num_microbatches,
        "measured": found.measured is not None,
        "problem": found.problem,
    }
