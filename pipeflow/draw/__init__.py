"""Drawings of timelines, planned or measured: `Gantt`, `Comparison` and `CriticalPath` for a terminal, `picture` for
docstrings, `svg`, `html` and `perfetto` for files. Drawings of measures: `Table` and `Scatter` for a terminal,
`scatter_svg` for files.
"""

from pipeflow.draw.files.perfetto import perfetto
from pipeflow.draw.files.scatter_svg import scatter_svg
from pipeflow.draw.files.svg import svg
from pipeflow.draw.page.html import html
from pipeflow.draw.plane import Axis, Point
from pipeflow.draw.terminal.comparison import Comparison
from pipeflow.draw.terminal.gantt import Gantt
from pipeflow.draw.terminal.path import CriticalPath
from pipeflow.draw.terminal.scatter import Scatter
from pipeflow.draw.terminal.table import Table
from pipeflow.draw.terminal.text import picture

__all__ = [
    "Axis",
    "Comparison",
    "CriticalPath",
    "Gantt",
    "Point",
    "Scatter",
    "Table",
    "html",
    "perfetto",
    "picture",
    "scatter_svg",
    "svg",
]
