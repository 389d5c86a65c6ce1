"""`pipeflow list`: all schedules."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pipeflow.cli.options import flag
from pipeflow.schedules import SCHEDULES, options_of

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Adds `pipeflow list` to the subcommands."""
    command = commands.add_parser("list", help="list the schedules and their options")
    command.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Prints one line per schedule. In a terminal that is too narrow, lines are folded, with the options below."""
    summaries = {name: (generator.__doc__ or "").partition("\n")[0] for name, generator in SCHEDULES.items()}
    options = {name: " ".join(map(_flag, options_of(name))) for name in SCHEDULES}
    widths = max(map(len, options)), max(map(len, options.values()))
    lines = [
        f"{name:{widths[0]}}  {options[name]:{widths[1]}}  {summary}".rstrip() for name, summary in summaries.items()
    ]
    if sys.stdout.isatty():
        lines = _fitting(lines, summaries, options)
    print("\n".join(lines))
    return 0


def _fitting(lines: list[str], summaries: dict[str, str], options: dict[str, str]) -> list[str]:
    """The lines if they fit the terminal, otherwise folded ones."""
    import shutil
    import textwrap

    columns = shutil.get_terminal_size().columns
    if max(map(len, lines)) <= columns:
        return lines
    width = max(map(len, options)) + 2
    return [
        textwrap.fill(text, columns, initial_indent=first, subsequent_indent=" " * width)
        for name, summary in summaries.items()
        for text, first in ((summary, f"{name:{width}}"), (options[name], " " * width))
        if text
    ]


def _flag(option: str) -> str:
    return "--costs" if option == "cost" else flag(option)
