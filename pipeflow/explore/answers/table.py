"""The table of questions that the page can ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeflow.explore.answers.compare import compare
from pipeflow.explore.answers.export import code, csv, json, svg
from pipeflow.explore.answers.file import file
from pipeflow.explore.answers.model import model
from pipeflow.explore.answers.plan import plan
from pipeflow.explore.answers.search import search
from pipeflow.explore.answers.start import start
from pipeflow.explore.answers.tour import tour
from pipeflow.explore.answers.window import window

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
    "window": window,
}
"""The functions that answer, by the last part of the address that the page asks."""
