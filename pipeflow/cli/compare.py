"""`pipeflow compare`: the measures of several schedules under the same costs, as a table and as a plot."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeflow.analysis.measures import Measures
from pipeflow.cli.beside import ComparedSchedules
from pipeflow.cli.files import write
from pipeflow.cli.options import cost_options, schedule_name, schedule_options
from pipeflow.cli.outputs import show
from pipeflow.cli.request import Request
from pipeflow.core.errors import UsageError
from pipeflow.draw.columns import COLUMNS, Column, columns_in, grouped, plot
from pipeflow.draw.times import Unit
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.registry import COMPARED

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands
    from pipeflow.draw import Table

Found = dict[str, Measures]
TABLE = tuple(name for name in COLUMNS if name != "span")


def add_to(commands: Commands) -> None:
    """Adds the command and its options."""
    parents = [schedule_options(), cost_options()]
    command = commands.add_parser("compare", help="compare schedules under the same costs", parents=parents)
    help_ = "names or files (default: every schedule)"
    command.add_argument("schedules", type=schedule_name, metavar="SCHEDULE", nargs="*", help=help_)
    group = command.add_argument_group("output")
    group.add_argument(
        "--sort",
        choices=["name", *TABLE],
        default="makespan",
        metavar="COLUMN",
        help=f"sort by {', '.join(['name', *TABLE])} (default: makespan)",
    )
    group.add_argument(
        "--svg", metavar="FILE", help="write a plot of bubble against peak memory as SVG (-: standard output)"
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures each schedule and prints the result."""
    if arguments.json and arguments.svg == "-":
        raise UsageError("standard output can take one output, not --json and --svg")
    names = list(dict.fromkeys(arguments.schedules)) or list(COMPARED)
    found, refused, unit = _measured(names, Request.of(arguments))
    if not found:
        raise UsageError("; ".join(grouped(refused)))
    found = _sorted(found, arguments.sort)
    if arguments.svg is not None:
        from pipeflow.draw import scatter_svg

        write({arguments.svg: scatter_svg(*plot(found))})
    if arguments.json:
        import json

        schedules = {name: asdict(measures) for name, measures in found.items()}
        print(json.dumps({"schedules": schedules, "refused": refused}))
    elif arguments.svg is None:
        _show(found, refused, columns_in(unit))
    return 0


def _measured(names: list[str], request: Request) -> tuple[Found, dict[str, str], Unit]:
    """The measures of the schedules that can be made with these options, the reasons why the others cannot, and the
    unit of the times. A name that is unknown, or a file that does not fit, is an error.
    """
    found, refused = {}, {}
    timelines = []
    beside = ComparedSchedules.of(names, request)
    for name in names:
        try:
            source = beside.source(name)
            timelines.append(beside.timeline(name, source))
            found[name] = Measures.of(source.schedule, timelines[-1])
        except UsageError as error:
            if name not in SCHEDULES:
                raise
            refused[name] = " ".join(str(error).split())
    return found, refused, Unit.of(timelines)


def _sorted(found: Found, by: str) -> Found:
    """The schedules, least first. Equal ones are sorted by makespan, then as in the registry."""

    def key(name: str) -> tuple[float, ...]:
        return tuple(round(COLUMNS[column].of(found[name]) or 0.0, 9) for column in (by, "makespan"))

    names = sorted(found) if by == "name" else sorted(found, key=key)
    return {name: found[name] for name in names}


def _show(found: Found, refused: Mapping[str, str], columns: Mapping[str, Column]) -> None:
    from pipeflow.draw import Scatter

    shown = [
        column
        for column in map(columns.__getitem__, TABLE)
        if any(column.of(each) is not None for each in found.values())
    ]
    same = [column for column in shown if len(found) > 1 and len({column.cell(each) for each in found.values()}) == 1]
    first = next(iter(found.values()))
    notes = [f"{' '.join(column.title.split())}: {column.cell(first)} for all schedules" for column in same]
    notes += [f"left out: {line}" for line in grouped(refused)]
    table = _table(found, [column for column in shown if column not in same])
    show(table, *[""] * bool(notes), *notes, "", Scatter(*plot(found)))


def _table(found: Found, columns: list[Column]) -> Table:
    from pipeflow.draw import Table

    best = set()
    for index, column in enumerate(columns, start=1):
        cells = [column.of(measures) for measures in found.values()]
        least = min(cell for cell in cells if cell is not None)
        texts = [column.cell(measures) for measures in found.values()]
        best |= {(row, index) for row, text in enumerate(texts) if text == column.text(least)}
    rows = [[name, *(column.cell(measures) for column in columns)] for name, measures in found.items()]
    return Table(["schedule", *(column.title for column in columns)], rows, frozenset(best))
