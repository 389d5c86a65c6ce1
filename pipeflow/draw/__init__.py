"""Drawings of timelines, planned or measured: `Gantt` and `Comparison` for a terminal, `picture` for docstrings,
`svg`, `html` and `perfetto` for files.
"""

from pipeflow.draw.comparison import Comparison
from pipeflow.draw.gantt import Gantt
from pipeflow.draw.html import html
from pipeflow.draw.perfetto import perfetto
from pipeflow.draw.svg import svg
from pipeflow.draw.text import picture

__all__ = ["Comparison", "Gantt", "html", "perfetto", "picture", "svg"]
