"""Drawings of timelines, planned or measured: `Gantt`, `Comparison` and `CriticalPath` for a terminal, `picture` for
docstrings, `svg`, `html` and `perfetto` for files. Drawings of measures: `Table` and `Scatter` for a terminal,
`scatter_svg` and `bars_svg` for files.

Each is loaded when it is first used, since those for a terminal need rich.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.draw.files.svg_bars import Bar, bars_svg
    from pipeflow.draw.files.svg_scatter import scatter_svg
    from pipeflow.draw.files.svg_timeline import svg
    from pipeflow.draw.files.trace_events import perfetto
    from pipeflow.draw.page.timeline_page import html
    from pipeflow.draw.plane import Axis, Point
    from pipeflow.draw.terminal.comparison import Comparison
    from pipeflow.draw.terminal.gantt import Gantt
    from pipeflow.draw.terminal.path import CriticalPath
    from pipeflow.draw.terminal.scatter import Scatter
    from pipeflow.draw.terminal.table import Table
    from pipeflow.draw.terminal.text import picture

_LATER = {
    "Axis": "plane",
    "Bar": "files.svg_bars",
    "Comparison": "terminal.comparison",
    "CriticalPath": "terminal.path",
    "Gantt": "terminal.gantt",
    "Point": "plane",
    "Scatter": "terminal.scatter",
    "Table": "terminal.table",
    "bars_svg": "files.svg_bars",
    "html": "page.timeline_page",
    "perfetto": "files.trace_events",
    "picture": "terminal.text",
    "scatter_svg": "files.svg_scatter",
    "svg": "files.svg_timeline",
}

__all__ = [
    "Axis",
    "Bar",
    "Comparison",
    "CriticalPath",
    "Gantt",
    "Point",
    "Scatter",
    "Table",
    "bars_svg",
    "html",
    "perfetto",
    "picture",
    "scatter_svg",
    "svg",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _LATER:
        raise AttributeError(f"module 'pipeflow.draw' has no attribute {name!r}")
    return getattr(import_module(f"pipeflow.draw.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
