"""`pipeflow draw`, `simulate`, `verify` and `export`: one schedule as a drawing, as
measures, proved sound, and as a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from pipeflow.core.analysis.measures import busy_times, path_times, stream_times
from pipeflow.core.analysis.other_engines import lowered_csv
from pipeflow.core.errors import UsageError
from pipeflow.core.text import bytes_text, number, percent, printable
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.registry import family_options
from pipeflow.tools.cli.conclusions import timeline_said, too_dense
from pipeflow.tools.cli.options import UNITS, Commands, add_costs, add_schedule, add_sizes, add_units
from pipeflow.tools.cli.outputs import FORMATS, STANDARD_OUTPUT, add_outputs, files_named, show, write, write_drawings
from pipeflow.tools.cli.requests import GivenCosts, changed, ordered_schedule, refuse, timeline_of, violations_of


def add_draw(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser("draw", help="draw the timeline of a schedule, or a measured one")
    for add in (add_schedule, add_sizes, add_costs, add_units):
        add(command)
    add_outputs(command, *FORMATS)
    help_ = "list the actions that make up the makespan, and mark them in files"
    command.add_argument("--critical-path", action="store_true", help=help_)
    command.set_defaults(run=run_draw)


def run_draw(arguments: argparse.Namespace) -> int:
    """Draws the timeline in the terminal, or writes it into the files that are named."""
    paths = files_named(arguments, *FORMATS)
    if arguments.critical_path and STANDARD_OUTPUT in paths.values():
        raise UsageError("standard output can take one output, not a file and --critical-path")
    if paths:
        refuse(arguments, ("memory",), "for files, which always show it")
    if paths.keys() == {"perfetto"} and not arguments.critical_path:
        refuse(arguments, UNITS, "with --perfetto, whose unit of time is the second")
    timeline = timeline_of(arguments.schedule, arguments)
    unit, factor = arguments.unit, arguments.factor
    if paths:
        write_drawings(paths, timeline, unit=unit, factor=factor, critical_path=arguments.critical_path)
    else:
        from pipeflow.draw import Gantt

        said = timeline_said(timeline, Unit.of([timeline], unit, factor))
        show(said, Gantt(timeline, unit, factor, memory=arguments.memory), *too_dense(timeline))
    if arguments.critical_path:
        from pipeflow.draw import CriticalPath

        show(*[] if paths else [""], CriticalPath(timeline, unit, factor))
    return 0


def add_simulate(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser("simulate", help="print the measures of a timeline")
    for add in (add_schedule, add_sizes, add_costs, add_units):
        add(command)
    command.add_argument("--json", action="store_true", help="print JSON, in the timeline's own unit of time")
    command.set_defaults(run=run_simulate)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Prints the makespan, bubble, peaks and transfers of a schedule or a timeline."""
    if arguments.json:
        refuse(arguments, UNITS, "with --json, whose times are in the timeline's own unit")
    timeline = timeline_of(arguments.schedule, arguments)
    if arguments.json:
        print(json.dumps(_measures(timeline)))
    else:
        texts = _texts(timeline, arguments.unit, arguments.factor)
        print(printable(timeline_said(timeline, Unit.of([timeline], arguments.unit, arguments.factor))))
        width = max(map(len, texts))
        for name, text in texts.items():
            print(f"{name:{width}}  {text}")
    return 0


def _measures(timeline: Timeline) -> dict[str, object]:
    by_rank, beside, waiting = path_times(timeline)
    others = {stream.value: time for stream, time in beside.items()}
    return {
        **({"unit": timeline.unit} if timeline.unit else {}),
        "makespan": timeline.makespan,
        "span": timeline.span,
        "makespan_bubble_ratio": timeline.makespan_bubble_ratio,
        "bubble_ratio": timeline.bubble_ratio,
        "idle": [timeline.makespan - busy for busy in busy_times(timeline)],
        "peak_activations": timeline.peak_activations,
        **({"peak_bytes": timeline.peak_bytes} if timeline.saved_bytes else {}),
        **({"exposed": timeline.exposed} if beside else {}),
        "critical_path": {"computing": sum(by_rank), **others, "waiting": waiting, "computing_by_rank": by_rank},
    }


def _texts(timeline: Timeline, unit: str, factor: float) -> dict[str, str]:
    written = Unit.of([timeline], unit, factor)

    def time(value: float) -> str:
        return f"{value * written.factor:.6g} {written.name}".rstrip()

    def times(values: Iterable[float]) -> str:
        return f"{' '.join(f'{each * written.factor:.4g}' for each in values)} {written.name}".rstrip()

    by_rank, beside, waiting = path_times(timeline)
    most = stream_times(timeline)
    others = [f"{stream} {time(each)}" for stream, each in beside.items()]
    part = percent(waiting / timeline.makespan if timeline.makespan else 0.0)
    path = [f"computing {time(sum(by_rank))}", *others, f"waiting {time(waiting)} ({part})"]
    exposed = time(timeline.exposed)
    streams = {stream.value: f"{time(most.get(stream, 0.0))}, exposed {exposed}" for stream in beside}
    return {
        "makespan": time(timeline.makespan),
        "span": time(timeline.span),
        "bubble": f"{percent(timeline.makespan_bubble_ratio)} of the makespan, in which the busiest rank is idle",
        "bubble of span": percent(timeline.bubble_ratio),
        "idle by rank": times(timeline.makespan - busy for busy in busy_times(timeline)),
        "peak activations": " ".join(map(number, timeline.peak_activations)),
        **({"peak memory": "  ".join(map(bytes_text, timeline.peak_bytes))} if timeline.saved_bytes else {}),
        **streams,
        "critical path": ", ".join(path),
        "  by rank": times(by_rank),
    }


def add_verify(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser("verify", help="check a schedule and list everything that is wrong")
    for add in (add_schedule, add_sizes, add_costs):  # costs: some schedules are made for them
        add(command)
    if "memory_cap" not in family_options():
        help_ = "also check that no rank keeps more activations than this, in microbatches"
        command.add_argument("--memory-cap", type=float, metavar="X", help=help_)
    command.set_defaults(run=run_verify)


def run_verify(arguments: argparse.Namespace) -> int:
    """Prints that the schedule is sound, or one line per violation."""
    name: str = arguments.schedule
    costs, cap = GivenCosts.of(arguments), arguments.memory_cap
    if name not in SCHEDULES or "memory_cap" not in options_of(name):
        arguments = changed(arguments, memory_cap=None)
    schedule = ordered_schedule(name, arguments, costs)
    violations = violations_of(schedule, cap, costs)
    if violations:
        many = f"{len(violations)} violation{'s' * (len(violations) > 1)}"
        print(f"The schedule is unsound: it has {many}.")
    for violation in violations:
        print(printable(str(violation)))
    if violations:
        return 1
    placement = schedule.placement
    cut = f" of {schedule.slices} slices" if schedule.slices > 1 else ""
    print(
        f"{printable(schedule.name)} is sound: {placement.num_ranks} ranks, {placement.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches{cut}"
    )
    return 0


def add_export(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser("export", help="write a schedule as a CSV table")
    for add in (add_schedule, add_sizes, add_costs):  # costs: some schedules are made for them
        add(command)
    command.add_argument(
        "--csv", required=True, metavar="FILE", help="file to write, one line per rank (-: standard output)"
    )
    help_ = "write sends and receives too, as torch.distributed.pipelining loads them with format compute_comms"
    command.add_argument("--lowered", action="store_true", help=help_)
    command.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    """Writes the schedule as CSV, with one line per rank."""
    schedule = ordered_schedule(arguments.schedule, arguments, GivenCosts.of(arguments))
    write({arguments.csv: lowered_csv(schedule) if arguments.lowered else schedule.to_csv()})
    return 0
