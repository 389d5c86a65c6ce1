"""Drawings of timelines, planned or measured: `Gantt`, `Comparison` and `CriticalPath` for a terminal, `picture` for
docstrings; and of measures: `Table` and `Scatter` for a terminal, `scatter_svg`.
"""

from pipeflow.draw.comparison import Comparison
from pipeflow.draw.gantt import Gantt
from pipeflow.draw.path import CriticalPath
from pipeflow.draw.scatter import Axis, Point, Scatter
from pipeflow.draw.scatter_svg import scatter_svg
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
    "picture",
    "scatter_svg",
]
