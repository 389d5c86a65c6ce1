"""Outputs: drawings in the terminal, or in files of several formats."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from pipeflow.cli.files import STANDARD_OUTPUT, write
from pipeflow.cli.options import Parser, flag
from pipeflow.cli.progress import doing
from pipeflow.core.errors import UsageError
from pipeflow.core.text import printable
from pipeflow.core.timeline import Timeline

NO_BREAK = "\N{NO-BREAK SPACE}"

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMATS = {
    "svg": "write a vector picture",
    "html": "write an interactive page",
    "perfetto": "write a trace for ui.perfetto.dev; one unit of time is one second",
}


def add_outputs(command: Parser, *formats: str) -> None:
    """Adds the options that name files, for these `formats`."""
    group = command.add_argument_group("output", "draws in the terminal unless you name files (-: standard output)")
    for name in formats:
        group.add_argument(flag(name), metavar="FILE", help=FORMATS[name])
    group.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the memory of each rank")


def files_named(arguments: argparse.Namespace, *formats: str) -> dict[str, str]:
    """Per format, the file that was given for it. Raises UsageError for a file that is given twice."""
    paths = {name: path for name in formats if (path := getattr(arguments, name)) is not None}
    for path in paths.values():
        if (times := [*paths.values()].count(path)) > 1:
            raise UsageError(
                f"{'standard output' if path == STANDARD_OUTPUT else path} can take one output, not {times}"
            )
    return paths


def write_drawings(
    paths: dict[str, str], *timelines: Timeline, unit: str, factor: float, critical_path: bool = False
) -> None:
    """Writes the timelines into the files of `files_named`, all of them or none. The critical path is marked in formats
    that can show it.
    """
    from pipeflow import draw

    texts = {}
    for name, path in paths.items():
        look: dict[str, Any] = {"unit": unit, "factor": factor, **({"critical_path": True} if critical_path else {})}
        look = {} if name == "perfetto" else look  # a trace has its own unit of time
        with doing(f"drawing {printable(path)}"):
            texts[path] = getattr(draw, name)(timelines[0] if len(timelines) == 1 else timelines, **look)
    write(texts)


def show(*renderables: RenderableType) -> None:
    """Prints to standard output, with the colours that it supports, line by line. A string is one line; its control
    characters are escaped. Drawings escape theirs themselves.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with doing("drawing"), console.capture() as capture:
        for renderable in renderables:
            safe = printable(renderable) if isinstance(renderable, str) else renderable
            console.print(safe, markup=False, crop=False)
    sys.stdout.writelines(capture.get().splitlines(keepends=True))


def wrapped(text: str) -> list[str]:
    """Lines that a terminal has room for; units stay beside their numbers."""
    kept = re.sub(r"(?<=[0-9]) (?=s\b)", NO_BREAK, text)
    return [line.replace(NO_BREAK, " ") for line in textwrap.wrap(kept, 80, subsequent_indent="  ")]
