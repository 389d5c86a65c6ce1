"""`pipeflow list`: the schedules there are."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from pipeflow.cli.options import flag
from pipeflow.schedules import SCHEDULES, options_of

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands


def add_to(commands: Commands) -> None:
    """The command and its options."""
    command = commands.add_parser("list", help="the schedules there are, with their options")
    command.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """One line a schedule; on a terminal, folded where it is too narrow."""
    options = {
        name: " ".join("--costs" if option == "cost" else flag(option) for option in options_of(name))
        for name in SCHEDULES
    }
    widths = max(map(len, options)), max(map(len, options.values()))
    for name, generator in SCHEDULES.items():
        summary = (generator.__doc__ or "").partition("\n")[0]
        line = f"{name:{widths[0]}}  {options[name]:{widths[1]}}  {summary}".rstrip()
        print(_folded(line, sum(widths) + 4) if sys.stdout.isatty() else line)
    return 0


def _folded(line: str, indent: int) -> str:
    columns = max(shutil.get_terminal_size().columns, indent + 20)
    head, rest = line[:indent], line[indent:]
    return head + f"\n{' ' * indent}".join(textwrap.wrap(rest, columns - indent))
