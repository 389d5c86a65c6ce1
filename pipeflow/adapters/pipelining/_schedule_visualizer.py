"""The names of torch's visualizer of schedules, for pipeflow's schedules too. Must not contain: how they are drawn."""

from __future__ import annotations

from typing import Any

from pipeflow.adapters.pipelining.schedules import get_schedule_class
from pipeflow.engine.torch_private.pipelining import schedule_visualizer as theirs


def get_schedule_ops(schedule: str | type[Any], *others: Any, **named: Any) -> list[list[Any]]:
    """The actions of each rank, as torch's function returns them. `schedule` is a class, or any name of a schedule.

    Raises UsageError, a ValueError, for an unknown name.
    """
    kind = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    return theirs.get_schedule_ops(kind, *others, **named)


def __getattr__(name: str) -> Any:
    """Other names of torch's module."""
    return getattr(theirs, name)
