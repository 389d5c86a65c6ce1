"""Drawings of timelines, planned or measured: `Gantt` and `Comparison` for a terminal, `picture` for docstrings."""

from pipeflow.draw.comparison import Comparison
from pipeflow.draw.gantt import Gantt
from pipeflow.draw.text import picture

__all__ = ["Comparison", "Gantt", "picture"]
