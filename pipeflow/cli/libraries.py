"""`pipeflow plan --for`: the options of another library for the layout of a plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipeflow.cli.files import STANDARD_OUTPUT
from pipeflow.cli.options import Parser
from pipeflow.core.errors import UsageError
from pipeflow.planning.libraries import LIBRARIES, Library, LibraryOptions
from pipeflow.planning.step_plan import Plan


def add_library(command: Parser) -> None:
    """Adds the option that names the library."""
    help_ = "print the options of this library for the layout; for a search, for the best layout that it can run"
    command.add_argument("--for", dest="library", choices=LIBRARIES, help=help_)


def require_one_output(arguments: argparse.Namespace) -> None:
    """Raises UsageError for more than one of --for, --json and a plot for standard output."""
    given = {"--for": arguments.library, "--json": arguments.json, "--svg": arguments.svg == STANDARD_OUTPUT}
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise UsageError(f"standard output can take one output, not {' and '.join(names)}")


def print_options(arguments: argparse.Namespace, *found: Plan) -> None:
    """Prints the options for the first of these plans that the library can run, and on the error stream what they do
    not say. Raises UsageError if it can run none, and for another output to standard output.
    """
    if arguments.json or arguments.svg == STANDARD_OUTPUT:
        raise UsageError(
            f"standard output can take one output, not --for and {'--json' if arguments.json else '--svg'}"
        )
    options, notes = _first(LIBRARIES[arguments.library], found)
    for note in (*notes, *options.notes):
        print(f"pipeflow: note: {note}", file=sys.stderr)
    print(options.text)


def _first(library: Library, found: Sequence[Plan]) -> tuple[LibraryOptions, list[str]]:
    """The options for the first plan that has any, and why the plans before it have none."""
    refused: list[str] = []
    for place, each in enumerate(found, start=1):
        try:
            return library.options(each), refused
        except UsageError as error:
            if len(found) == 1:
                raise
            refused.append(f"layout {place} is left out: {error}")
    raise UsageError(f"{library.name} can run none of the {len(found)} best layouts; {refused[0]}")


def schedules_of(arguments: argparse.Namespace, searched: tuple[str, ...]) -> tuple[str, ...]:
    """The schedules to search: of those `searched`, all or those that the library has."""
    if arguments.library is None:
        return searched
    return tuple(name for name in searched if name in LIBRARIES[arguments.library].schedules)
