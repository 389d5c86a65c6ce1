"""Drawings of timelines, planned or measured: `Gantt`, `Comparison` and `CriticalPath` for a terminal, `picture` for
docstrings, `svg`, `animated_svg`, `html` and `perfetto` for files. Drawings of measures: `Table` and `Scatter` for a
terminal, `scatter_svg` and `bars_svg` for files.

Each is loaded when it is first used, since those for a terminal need rich.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.draw.animation import animated_svg
    from pipeflow.draw.gantt import Comparison, Gantt, picture
    from pipeflow.draw.page.timeline_page import html
    from pipeflow.draw.path import CriticalPath
    from pipeflow.draw.plane import Axis, Point
    from pipeflow.draw.svg_charts import Bar, bars_svg, scatter_svg
    from pipeflow.draw.svg_timeline import svg
    from pipeflow.draw.tables import Scatter, Table
    from pipeflow.draw.trace_events import perfetto

_MODULES = {
    "animation": ("animated_svg",),
    "gantt": ("Comparison", "Gantt", "picture"),
    "page.timeline_page": ("html",),
    "path": ("CriticalPath",),
    "plane": ("Axis", "Point"),
    "svg_charts": ("Bar", "bars_svg", "scatter_svg"),
    "svg_timeline": ("svg",),
    "tables": ("Scatter", "Table"),
    "trace_events": ("perfetto",),
}

__all__ = ["Axis", "Bar", "Comparison", "CriticalPath", "Gantt", "Point", "Scatter", "Table"]
__all__ += ["animated_svg", "bars_svg", "html", "perfetto", "picture", "scatter_svg", "svg"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"pipeflow.draw.{module}"), name)
    raise AttributeError(f"module 'pipeflow.draw' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
