"""The table of questions that the page can ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeflow.explore.answers.better_order import search
from pipeflow.explore.answers.comparison import compare
from pipeflow.explore.answers.dropped_trace import trace
from pipeflow.explore.answers.edit_fields import start
from pipeflow.explore.answers.export import code, csv, json, svg
from pipeflow.explore.answers.model_step import model
from pipeflow.explore.answers.opened_file import file
from pipeflow.explore.answers.time_range import window
from pipeflow.explore.answers.timelines import plan
from pipeflow.explore.answers.tour_steps import tour

Answer = Callable[[Mapping[str, str]], dict[str, Any]]

ANSWERS: Mapping[str, Answer] = {
    "code": code,
    "compare": compare,
    "csv": csv,
    "file": file,
    "json": json,
    "model": model,
    "plan": plan,
    "search": search,
    "start": start,
    "svg": svg,
    "tour": tour,
    "trace": trace,
    "window": window,
}
"""The functions that answer, by the last part of the address that the page asks."""
