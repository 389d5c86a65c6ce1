"""`pipeflow diff`: two schedules, or a plan and what happened: what moved, what it costs, how it looks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeflow.analysis.measures import Measures
from pipeflow.cli.columns import COLUMNS
from pipeflow.cli.costs import Costs
from pipeflow.cli.differences import difference_lines
from pipeflow.cli.options import cost_options, schedule_name, schedule_options, unit_options
from pipeflow.cli.outputs import add_outputs, files_named, show, write_drawings
from pipeflow.cli.request import Request, is_file
from pipeflow.cli.sources import Source, sound_source
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands
    from pipeflow.draw import Table
    from pipeflow.draw.times import Unit

FORMATS = ("html", "perfetto")  # of those of `draw`, the ones that can hold two timelines
TIMES = ("makespan", "span")
RATIOS = ("bubble", "makespan-bubble")


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parents = [schedule_options(), cost_options(), unit_options()]
    command = commands.add_parser("diff", help="two schedules, or a plan and what was measured", parents=parents)
    which = "a name from `pipeflow list`, a CSV file, or a timeline kept as JSON"
    command.add_argument("first", type=schedule_name, metavar="A", help=which)
    command.add_argument("second", type=schedule_name, metavar="B", help="another one")
    add_outputs(command, *FORMATS)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows what differs, then both timelines on one time scale."""
    paths = files_named(arguments, *FORMATS)
    names = [arguments.first, arguments.second]
    request = Request.of(arguments)
    sources = _sources(names, request)
    timelines = _timelines(sources, request.costs)
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
    table = _table(names, sources, timelines, Unit(unit, factor))
    picture = Comparison(*timelines, unit, factor, titles, arguments.memory)
    show(*lines, "", table, *_ratio(timelines, measured), "", picture)
    return 0


def _sources(names: list[str], request: Request) -> list[Source]:
    """Both sources. A named schedule has the sizes of the file that it is compared with, where none are given, and
    reductions where that has them.
    """
    parts = [request.among(names)[name] for name in names]
    sources = {index: sound_source(name, parts[index]) for index, name in enumerate(names) if is_file(name)}
    for file in list(sources.values()):
        ranks, microbatches = file.schedule.placement.num_ranks, file.schedule.num_microbatches
        parts = [
            replace(
                part,
                ranks=ranks if part.ranks is None else part.ranks,
                microbatches=microbatches if part.microbatches is None else part.microbatches,
            )
            for part in parts
        ]
    reduces = any(Stream.REDUCE in file.schedule.streams for file in sources.values())
    for index, name in enumerate(names):
        if index not in sources:
            schedule = sound_source(name, parts[index]).schedule
            sources[index] = Source(schedule.with_reductions() if reduces else schedule)
    return [sources[index] for index in range(len(names))]


def _timelines(sources: list[Source], costs: Costs) -> tuple[Timeline, Timeline]:
    """Both timelines. A plan beside a measured timeline is simulated under the costs that were measured, unless costs
    are given.
    """
    measured = [source.measured for source in sources if source.measured is not None]
    if len(measured) == 2 and costs.given is not None:
        raise UsageError(f"{costs.given} is for schedules; the times of a timeline are its own")
    if not measured or costs.given is not None:
        first, second = (source.measured or source.timeline(costs) for source in sources)
        return first, second
    from pipeflow.analysis.measured import measured_costs
    from pipeflow.analysis.simulate import simulate

    model = measured_costs(measured[0])
    for schedule in (source.schedule for source in sources if source.measured is None):
        if (stages := schedule.placement.num_stages) != len(model.forward):
            raise UsageError(
                f"{schedule.name} has {stages} stages and what was measured {len(model.forward)}, so its costs do "
                "not fit: give costs, as in --forward 1"
            )
    first, second = (source.measured or simulate(source.schedule, model) for source in sources)
    return first, second


def _table(names: list[str], sources: list[Source], timelines: tuple[Timeline, Timeline], unit: Unit) -> Table:
    from pipeflow.draw import Table

    both = zip(sources, timelines, strict=True)
    first, second = (Measures.of(source.schedule, timeline) for source, timeline in both)
    rows = []
    for key, column in COLUMNS.items():
        before, after = column.of(first), column.of(second)
        if before is None or after is None:
            continue
        text = unit.text if key in TIMES else column.text
        rows.append([" ".join(column.title.split()), text(before), text(after), *_change(key, before, after, text)])
    return Table(["", *names, "change", ""], rows)


def _change(key: str, before: float, after: float, text: Callable[[float], str]) -> list[str]:
    difference = after - before
    if abs(difference) <= 1e-9 * max(abs(before), abs(after)):
        return ["same", ""]
    if key in RATIOS:
        return [f"{100 * difference:+.1f} points", ""]
    sign = "+" if difference > 0 else "-"
    return [sign + text(abs(difference)), f"{difference / before:+.1%}" if before else ""]


def _ratio(timelines: tuple[Timeline, Timeline], measured: list[bool]) -> list[str]:
    """How the plan's makespan compares with the measured one."""
    if measured[0] == measured[1]:
        return []
    planned, happened = reversed(timelines) if measured[0] else timelines
    if not happened.makespan:
        return []
    return ["", f"planned / measured: {planned.makespan / happened.makespan:.3f}"]
