"""Writes schedules.md and schedules.svg, the gallery of all schedules, from the command's output: `make gallery`."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

from pipeflow.schedules import SCHEDULES, make_schedule, options_of
from pipeflow.tools.cli import main

RANKS, MICROBATCHES = 4, 8
SIZES = f"--ranks {RANKS} --microbatches {MICROBATCHES}"
PAPER = r"arXiv (\d{4}\.\d{5})"
WIDTHS = (80, 100, 120, 144)
NEEDED = {"seq1f1b": "--slices 2"}  # options without which a schedule is another one

INTRODUCTION = f"""\
# The schedules

This page shows every schedule of `pipeflow list` on {RANKS} ranks with {MICROBATCHES} microbatches. A forward takes 1,
each half of a backward 1, and a transfer 0. `make gallery` writes the page from the command's output.

In the pictures, the letter is the kind of action and the number is the microbatch; lower case is the second stage of a
rank. The line below each rank shows how many activations it keeps, where that number changes. The bubble is the part
of the step in which the busiest rank is idle. The bubble of the span leaves out the time before a rank's first start,
as the zero-bubble papers do.
"""


def write(folder: Path) -> None:
    """Writes both files."""
    (folder / "schedules.svg").write_text(said(f"compare {SIZES} --svg -", 80), encoding="utf-8")
    parts = [INTRODUCTION, "![Bubble against memory](schedules.svg)\n", block(f"compare {SIZES}", 80)]
    page = "\n".join([*parts, *map(section, SCHEDULES)])
    papers = sorted(set(re.findall(PAPER, page)))
    links = "".join(f"[arXiv {paper}]: https://arxiv.org/abs/{paper}\n" for paper in papers)
    (folder / "schedules.md").write_text(f"{page}\n{links}", encoding="utf-8")


def section(name: str) -> str:
    """The section of one schedule: its docstring, its options and its picture."""
    text = inspect.cleandoc(SCHEDULES[name].__doc__ or "").partition(">>>")[0].strip()
    text = re.sub(PAPER, r"[arXiv \1]", text)
    options = ", ".join(f"`--{option.replace('_', '-')}`" for option in options_of(name))
    asked = f"{name} {SIZES} {NEEDED.get(name, '')}".rstrip()
    command = f"draw {asked}"
    parts = [
        f"## {name}\n",
        f"{text}\n",
        f"Options: {options}.\n" if options else "",
        block(command, width(name, command)),
        f"In the browser: `pipeflow explore {asked}`\n",
    ]
    return "\n".join(filter(None, parts))


def width(name: str, command: str) -> int:
    """The smallest width at which every action shows its microbatch."""
    schedule = make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    actions = sum(1 for rank in range(RANKS) for _ in schedule.actions(rank))
    numbered = (each for each in WIDTHS if len(re.findall(r"[FBIWfbiw]\d", said(command, each))) >= actions)
    return next(numbered, WIDTHS[-1])


def block(command: str, columns: int) -> str:
    """A Markdown block with a command and its output."""
    return f"```console\n$ pipeflow {command}\n{said(command, columns).rstrip()}\n```\n"


def said(command: str, columns: int) -> str:
    """The output of the command in a pipe that is `columns` wide."""
    out = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": str(columns)}, clear=True), contextlib.redirect_stdout(out):
        if main(command.split()):
            raise SystemExit(f"pipeflow {command} failed")
    return out.getvalue()


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
