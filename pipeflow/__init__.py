"""pipeflow: pipeline parallelism for PyTorch models that do not fit on one device. A schedule is a plain Python object:
verify it, simulate it, draw it, run it, and compare the plan with the measured step.

Schedules need no torch. Names that need torch or other slow imports are loaded on first use, so that the command starts
fast.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from importlib import import_module
from pathlib import Path

from pipeflow.core.distributions import warn_of_others
from pipeflow.core.errors import ScheduleError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline

__version__ = "0.1.0"

warn_of_others(str(__file__).replace("\\", "/").rpartition("/pipeflow/")[0])

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module != "pipeflow"
    for alias in node.names
}
"""Where each public name is defined, as the stub beside this file says, which type checkers and editors read too."""

__all__ = sorted(_MODULES)


def _drawn(timeline: Timeline) -> str:
    from pipeflow.draw import svg

    return svg(timeline)


def _drawn_as_planned(schedule: Schedule) -> str | None:
    """An SVG of the simulated schedule. None if it cannot run: a notebook then shows its text."""
    from pipeflow.core.analysis.simulation import simulate

    try:
        return _drawn(simulate(schedule))
    except ScheduleError:
        return None


def _of_survivors(schedule: Schedule, replicas: int, dead: Collection[int]) -> Schedule:
    from pipeflow.schedules.replicas import of_survivors

    return of_survivors(schedule, replicas, dead)


Timeline.drawing, Schedule.drawing = staticmethod(_drawn), staticmethod(_drawn_as_planned)
Schedule.of_survivors = staticmethod(_of_survivors)


def __getattr__(name: str) -> object:
    if name == "huggingface":
        return import_module("pipeflow.huggingface")
    if name not in _MODULES:
        raise AttributeError(f"module 'pipeflow' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
