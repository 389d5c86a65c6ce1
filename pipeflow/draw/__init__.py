"""Drawings of timelines, planned or measured: `Gantt`, `Comparison` and `CriticalPath` for a terminal, `picture` for
docstrings, `svg`, `html` and `perfetto` for files. Of measures: `Table` and `Scatter` for a terminal, `scatter_svg`.
"""

from pipeflow.draw.comparison import Comparison
from pipeflow.draw.gantt import Gantt
from pipeflow.draw.html import html
from pipeflow.draw.path import CriticalPath
from pipeflow.draw.perfetto import perfetto
from pipeflow.draw.scatter import Axis, Point, Scatter
from pipeflow.draw.scatter_svg import scatter_svg
from pipeflow.draw.svg import svg
from pipeflow.draw.table import Table
from pipeflow.draw.text import picture

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
