"""Outputs: drawings in the terminal, files of several formats, which are written all or not at all, and what a command
is doing, on standard error, once it has taken longer than two seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing
from pipeflow.core.text import printable
from pipeflow.core.timeline import Timeline
from pipeflow.tools.cli.options import Parser, flag

if TYPE_CHECKING:
    from rich.console import RenderableType

AFTER = 2.0  # seconds
EARLY = 0.02  # share of the work before which the time left is not estimated


@contextmanager
def doing(what: str, *, seconds: float | None = None) -> Iterator[Callable[[float], None]]:
    """Context manager that reports `what` the command is doing if that takes long: on a terminal as a line with a bar
    that disappears at the end, otherwise as one line of text. The bar shows the share that is done and the time left:
    of `seconds` if the work takes a known time, otherwise what the yielded function was last called with, from 0 to 1.
    """
    done, began = Event(), time.monotonic()
    reported = [0.0]

    def share() -> float:
        return reported[0] if seconds is None else min((time.monotonic() - began) / seconds, 1.0)

    thread = Thread(target=_say, args=(what, began, done, share), daemon=True)
    thread.start()
    try:
        yield lambda each: reported.__setitem__(0, each)
    finally:
        done.set()
        thread.join()


def _say(what: str, began: float, done: Event, share: Callable[[], float]) -> None:
    if done.wait(AFTER):
        return
    if not sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(30), TextColumn("{task.fields[times]}")
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=4, transient=True) as progress:
        task = progress.add_task(what, total=None, times="")
        while not done.wait(0.25):
            elapsed, part = time.monotonic() - began, share()
            left = f", about {elapsed / part - elapsed:.0f} s left" if part > EARLY else ""
            progress.update(task, total=1 if part else None, completed=part, times=f"{elapsed:.0f} s{left}")


STANDARD_OUTPUT = "-"


def write(texts: Mapping[str, str]) -> None:
    """Writes each text to its path, all of them or none, and reports the files on standard error. The path `-` is
    standard output. An existing file is replaced in one step. Raises UsageError for a path that cannot be written.
    """
    paths = [path for path in texts if path != STANDARD_OUTPUT]
    try:
        with ExitStack() as files:
            for path in paths:
                if _is_replaced(path):
                    files.enter_context(replacing(path)).write_text(texts[path], encoding="utf-8")
        for path in paths:
            if not _is_replaced(path):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(texts[path])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    for path in paths:
        print(f"wrote {printable(path)}", file=sys.stderr)
    sys.stdout.writelines(texts.get(STANDARD_OUTPUT, "").splitlines(keepends=True))


def _is_replaced(path: str) -> bool:
    """False for a device or a pipe, into which the text is written. Raises OSError for a path that cannot be written,
    although a rename could replace it.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(0, "Is a directory")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionError(0, "Permission denied")
    return os.path.isfile(path) or not os.path.exists(path)


NO_BREAK = "\N{NO-BREAK SPACE}"


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
