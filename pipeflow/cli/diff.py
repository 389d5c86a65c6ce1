"""`pipeflow diff`: two schedules, or a simulated and a measured step: the moves, the measures, and both drawn. Two
plans of `pipeflow plan --json`: where their time and their memory differ.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeflow.analysis.measures import Measures
from pipeflow.cli.beside import ComparedSchedules
from pipeflow.cli.differences import difference_lines
from pipeflow.cli.options import cost_options, schedule_name, schedule_options, unit_options
from pipeflow.cli.outputs import add_outputs, files_named, show, write_drawings
from pipeflow.cli.plan_diff import is_plan, run_plans
from pipeflow.cli.request import Request
from pipeflow.cli.sources import ScheduleSource
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.draw.columns import changes

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands
    from pipeflow.draw import Table
    from pipeflow.draw.times import Unit

FORMATS = ("html", "perfetto")  # the formats of `draw` that can hold two timelines


def add_to(commands: Commands) -> None:
    """Adds the command and its options."""
    parents = [schedule_options(), cost_options(), unit_options()]
    command = commands.add_parser(
        "diff", help="show how two schedules differ, a plan and a measured step, or two plans", parents=parents
    )
    which = (
        "a name from `pipeflow list`, a CSV file, or in a JSON file a timeline or what `pipeflow plan --json` printed"
    )
    command.add_argument("first", type=schedule_name, metavar="A", help=which)
    command.add_argument("second", type=schedule_name, metavar="B", help="the schedule or timeline to compare it with")
    add_outputs(command, *FORMATS)
    command.add_argument("--svg", metavar="FILE", help="of two plans: write where the time of their steps goes as bars")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the differences, then both timelines on one time scale."""
    paths = files_named(arguments, *FORMATS)
    names = [arguments.first, arguments.second]
    if (plans := [*map(is_plan, names)]) == [True, True]:
        if paths:
            raise UsageError(f"--{min(paths)} draws schedules, not two plans: use --svg")
        return run_plans(names, arguments.svg)
    _require_schedules(names, plans, arguments.svg)
    request = Request.of(arguments)
    beside = ComparedSchedules.of(names, request)
    sources = [beside.source(name) for name in names]
    timelines = [beside.timeline(name, source) for name, source in zip(names, sources, strict=True)]
    measured = [source.measured is not None for source in sources]
    titles = ("planned", "measured") if measured == [False, True] else ("first", "second")
    unit, factor = arguments.unit, arguments.factor
    if paths:
        named = (replace(each, name=f"{title}: {each.name}") for title, each in zip(titles, timelines, strict=True))
        write_drawings(paths, *named, unit=unit, factor=factor)
        return 0

    from pipeflow.draw import Comparison
    from pipeflow.draw.times import Unit

    lines = difference_lines(sources[0].schedule, sources[1].schedule)
    table = _table(names, sources, timelines, Unit.of(timelines, unit, factor))
    picture = Comparison(timelines[0], timelines[1], unit, factor, titles, arguments.memory)
    show(*lines, "", table, *_ratio(timelines, measured), "", picture)
    return 0


def _require_schedules(names: list[str], plans: list[bool], svg: str | None) -> None:
    if any(plans):
        raise UsageError(f"{names[plans.index(True)]} is a plan: compare it with another one of pipeflow plan --json")
    if svg is not None:
        raise UsageError("--svg is for two plans; for schedules there are --html and --perfetto")


def _table(names: list[str], sources: list[ScheduleSource], timelines: list[Timeline], unit: Unit) -> Table:
    from pipeflow.draw import Table

    both = zip(sources, timelines, strict=True)
    first, second = (Measures.of(source.schedule, timeline) for source, timeline in both)
    rows = [[title, *change] for title, change in changes(first, second, unit).items()]
    return Table(["", *names, "change", ""], rows)


def _ratio(timelines: list[Timeline], measured: list[bool]) -> list[str]:
    """The ratio of the planned to the measured makespan, if one timeline was measured."""
    if measured[0] == measured[1]:
        return []
    planned, happened = reversed(timelines) if measured[0] else timelines
    if not happened.makespan:
        return []
    return ["", f"planned / measured: {planned.makespan / happened.makespan:.3f}"]
