"""`pipeflow explain`: what a recorded step of any engine was, why it took so long, and what would be faster."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from pipeflow.core.analysis.measures import busy_times
from pipeflow.core.analysis.other_engines import lowered_csv
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import number, percent
from pipeflow.draw import Table
from pipeflow.draw.captions import Unit
from pipeflow.planning.replanning import Candidate
from pipeflow.tools.cli.conclusions import stands_out
from pipeflow.tools.cli.jobs import job_for_programs, job_lines
from pipeflow.tools.cli.options import UNITS, Commands, add_units
from pipeflow.tools.cli.outputs import doing, files_named, show, wrapped, write, write_drawings
from pipeflow.tools.cli.requests import refuse
from pipeflow.tools.traces.explanation import NOTABLE, Explanation, explain
from pipeflow.tools.traces.jobs import Job
from pipeflow.tools.traces.trace_findings import KINDS

FILES = ("html", "svg")
SHOWN = 6  # gains in the terminal
LONGEST = 3  # idle times in the terminal
EXAMPLES = """\
examples:
  pipeflow explain traces/
  pipeflow explain rank0.json rank1.json --html explained.html --best best.csv
  pipeflow explain traces/ --names 'fwd stage (?P<stage>[0-9]+) mb (?P<microbatch>[0-9]+)'
"""


def add_explain(commands: Commands) -> None:
    """Adds `pipeflow explain` to the subcommands."""
    command = commands.add_parser(
        "explain",
        help="explain a recorded step of any engine: its schedule, its bubbles, and what would be faster",
        epilog=EXAMPLES,
    )
    add_units(command)
    add = command.add_argument
    which = "a trace per rank (torch.profiler, Chakra, Nsight Systems, OpenTelemetry), a folder of them, or a timeline"
    add("traces", nargs="+", metavar="TRACE", help=which)
    help_ = "regular expression for annotations, with groups kind, stage and microbatch, each of them optional"
    add("--names", metavar="PATTERN", help=help_)
    group = command.add_argument_group("output", "prints a summary unless you name files (-: standard output)")
    group.add_argument("--json", action="store_true", help="print JSON; times are in seconds")
    group.add_argument("--csv", metavar="FILE", help="write the schedule that ran as a CSV table")
    group.add_argument("--best", metavar="FILE", help="write the fastest order found as a CSV table")
    help_ = "write these tables with sends and receives, as torch loads them with format compute_comms"
    group.add_argument("--lowered", action="store_true", help=help_)
    group.add_argument(
        "--html", metavar="FILE", help="write a page with the measured step, its replay and the best order"
    )
    group.add_argument(
        "--svg", metavar="FILE", help="write the measured step as a vector picture, with its critical path"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation, and writes the files that are named."""
    paths = files_named(arguments, *FILES)
    if arguments.csv is None and arguments.best is None:
        refuse(arguments, ("lowered",), "without --csv or --best")
    if not paths and (arguments.json or arguments.csv or arguments.best):
        refuse(arguments, UNITS, "for JSON and tables: the times of JSON are in seconds")
    with doing("explaining the traces") as progress:
        found = explain(arguments.traces, names=arguments.names, progress=progress)
    if isinstance(found, Job):
        return _run_job(arguments, found)
    tables = dict(_tables(arguments, found))
    write(tables)
    unit, factor = arguments.unit, arguments.factor
    if "html" in paths:
        named = [replace(timeline, name=f"{title}: {timeline.name}") for title, timeline in _timelines(found)]
        write_drawings({"html": paths["html"]}, *named, unit=unit, factor=factor)
    if "svg" in paths:
        write_drawings({"svg": paths["svg"]}, found.timeline, unit=unit, factor=factor, critical_path=True)
    if arguments.json:
        print(json.dumps(_for_programs(found)))
    elif not paths and not tables:
        show(*_lines(found, Unit.of([found.timeline], unit, factor)))
    return 0


def _run_job(arguments: argparse.Namespace, found: Job) -> int:
    """Prints a job without a pipeline."""
    refuse(arguments, ("csv", "best", *FILES), "for a job without a pipeline, which has no schedule")
    unit, factor = arguments.unit, arguments.factor
    if arguments.json:
        print(json.dumps(job_for_programs(found)))
    else:
        show(*job_lines(found, Unit(unit, factor) if factor != 1 else Unit.readable(found.seconds, unit)))
    return 0


def _tables(arguments: argparse.Namespace, found: Explanation) -> Iterator[tuple[str, str]]:
    """The tables that were asked for, by their files."""
    table = lowered_csv if arguments.lowered else Schedule.to_csv
    if arguments.csv is not None:
        yield arguments.csv, table(found.schedule)
    if arguments.best is not None:
        if found.best is None:
            raise UsageError(
                "--best needs a sound step of training whose replay takes as long as it did: no other orders were tried"
            )
        yield arguments.best, table(found.best.schedule)


def _timelines(found: Explanation) -> Iterator[tuple[str, Any]]:
    yield "measured", found.timeline
    if found.replanned is not None and found.best is not None:
        yield "replayed", found.replanned.now.timeline
        yield "best order", found.best.timeline


def _for_programs(found: Explanation) -> dict[str, Any]:
    timeline, cost = found.timeline, found.cost
    return {
        "ranks": timeline.placement.num_ranks,
        "stages": timeline.placement.num_stages,
        "microbatches": timeline.num_microbatches,
        "schedule": timeline.name,
        "names": found.names,
        "nearest": None if found.nearest is None else found.nearest._asdict(),
        "placement": timeline.placement.paths,
        "violations": list(map(str, found.violations)),
        "step_seconds": timeline.makespan,
        "steps": found.step_seconds,
        "simulated_seconds": None if found.replay is None else found.replay.makespan,
        "bubble": timeline.makespan_bubble_ratio,
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end}
            for span in found.critical_path
        ],
        "idle": [each._asdict() for each in found.idle],
        "outside": [each._asdict() for each in found.outside],
        "findings": [each._asdict() for each in found.findings],
        "costs": None
        if cost is None
        else {name: getattr(cost, name) for name in ("forward", "backward_input", "backward_weight", "latency")},
        "gains": [
            {
                "schedule": each.schedule.name,
                "step_seconds": each.timeline.makespan,
                "bubble": each.timeline.makespan_bubble_ratio,
                "peak_activations": each.timeline.peak_activations,
            }
            for each in (*found.gains, *found.recut)
        ],
        "notes": found.notes,
    }


def _lines(found: Explanation, unit: Unit) -> Iterator[Any]:
    yield from _heading(found, unit)
    yield ""
    yield f"Times of each rank{f' in {unit.name}' if unit.name else ''}:"
    yield _idle_table(found, unit)
    waits = [each for each in found.idle if each.kind not in ("fill", "drain")]
    for each in sorted(waits, key=lambda each: each.start - each.end)[:LONGEST]:
        yield from wrapped(f"{unit.text(each.end - each.start)} on rank {each.rank}: {each.cause}")
    yield ""
    yield _cost_table(found, unit)
    yield ""
    if found.findings:
        yield "What stands out:"
        yield from (line for each in found.findings for line in wrapped(f"{unit.text(each.seconds)}: {each.text}"))
    else:
        yield "Nothing stands out: stages, links and ranks are alike."
    yield ""
    yield from _gains(found, unit)
    for note in found.notes:
        yield from wrapped(f"note: {note}")


def _heading(found: Explanation, unit: Unit) -> Iterator[str]:
    timeline, placement = found.timeline, found.timeline.placement
    what = found.names[0] if found.names else "an order without a name"
    if found.nearest is not None:
        what += f", nearest to {found.nearest.name} ({found.nearest.moved} entries stand elsewhere)"
    busy = busy_times(timeline)
    busiest = busy.index(max(busy))
    idle = percent(timeline.makespan_bubble_ratio)
    most = max(found.findings, key=lambda each: each.seconds, default=None)
    first = f"Rank {busiest}, the busiest one, was idle for {idle} of the step"
    yield from wrapped(f"{first}; {stands_out(most and most.text)}.")
    yield from wrapped(
        f"{what}: {placement.num_ranks} ranks, {placement.num_stages} stages, {timeline.num_microbatches} microbatches"
    )
    steps = sorted(found.step_seconds)
    several = f", the median of {len(steps)}, from {unit.text(steps[0])} to {unit.text(steps[-1])}" * (len(steps) > 1)
    yield f"step: {unit.text(timeline.makespan)}{several}"
    if found.outside:
        whole = timeline.makespan + sum(each.seconds for each in found.outside)
        yield f"  from its mark to the next one: {unit.text(whole)}"
    if found.outliers:
        late = " and ".join(str(each + 1) for each in found.outliers)
        yield f"  much longer: recorded step {late} of {len(steps)}"
    if found.replay is not None:
        replayed = found.replay.makespan
        apart = f"{replayed / timeline.makespan - 1:+.1%} of the measured step"
        yield f"replayed under its own costs: {unit.text(replayed)} ({apart})"
    yield f"measured bubble: {idle} (idle time of rank {busiest}, the busiest rank)"
    yield from wrapped(f"critical path: {_path(found, unit)}")
    for violation in found.violations[:5]:
        yield from wrapped(f"wrong: {violation}")


def _path(found: Explanation, unit: Unit) -> str:
    """How the time of the critical path is divided among ranks."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    for span in found.critical_path:
        times[span.rank].append(span.end - span.start)
    ranks = sorted(times, key=lambda rank: -sum(times[rank]))
    parts = [f"{len(times[rank])} actions of rank {rank} ({unit.text(sum(times[rank]))})" for rank in ranks[:SHOWN]]
    if len(ranks) > SHOWN:
        parts.append(f"{sum(len(times[rank]) for rank in ranks[SHOWN:])} of other ranks")
    between = found.timeline.makespan - sum(map(sum, times.values()))
    return f"{', '.join(parts)}, and {unit.text(between)} between them"


def _idle_table(found: Explanation, unit: Unit) -> Table:
    idle: defaultdict[tuple[int, str], float] = defaultdict(float)
    for each in found.idle:
        idle[each.rank, each.kind] += each.end - each.start
    rows, kinds = [], [kind for kind in KINDS if any(key[1] == kind for key in idle)]
    for rank, busy in enumerate(busy_times(found.timeline)):
        times = (busy, *(idle[rank, kind] for kind in kinds))
        rows.append([str(rank), *(number(time * unit.factor) for time in times)])
    return Table(["rank", "computes", *kinds], rows)


def _cost_table(found: Explanation, unit: Unit) -> Table:
    times: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for span in found.timeline:
        times[span.action.stage, span.action.kind.value].append(span.end - span.start)
    kinds = [kind for kind in "FBIW" if any(key[1] == kind for key in times)]
    placement = found.timeline.placement

    def cell(stage: int, kind: str) -> str:
        if not (mine := times.get((stage, kind))):
            return ""
        least, most = (number(each * unit.factor) for each in (min(mine), max(mine)))
        return f"{unit.text(median(mine))} ({least}-{most})"

    rows = [
        [str(stage), " ".join(map(str, placement.ranks_of(stage))), *(cell(stage, kind) for kind in kinds)]
        for stage in range(placement.num_stages)
    ]
    return Table(["stage", "rank", *(f"{kind}: median (range)" for kind in kinds)], rows)


def _same_orders(found: Explanation) -> list[tuple[str, Candidate]]:
    """Other orders than the one that ran, each with all of its names."""
    assert found.replanned is not None
    names: dict[object, list[str]] = {found.replanned.now.schedule.without_reductions().rows: []}
    first: dict[object, Candidate] = {}
    for each in found.gains:
        rows = each.schedule.without_reductions().rows
        names.setdefault(rows, []).append(each.schedule.name)
        first.setdefault(rows, each)
    return [(", ".join(names[rows]), each) for rows, each in first.items() if rows in list(names)[1:]]


def _gains(found: Explanation, unit: Unit) -> Iterator[Any]:
    if found.replanned is None:
        why = "its order is wrong" if found.violations else "it has no backwards"
        if found.replay is not None:
            why = "the costs above do not describe it, since its replay takes much more or less time than it did"
        yield from wrapped(f"No other order was tried for this step: {why}.")
        return
    now, same = found.replanned.now, _same_orders(found)
    rows = [
        [
            names,
            unit.text(each.timeline.makespan),
            f"{found.replanned.gain(each):+.1%}",
            percent(each.timeline.makespan_bubble_ratio),
            number(max(each.timeline.peak_activations)),
        ]
        for names, each in [*same[:SHOWN], ("as it ran", now), *((each.schedule.name, each) for each in found.recut)]
    ]
    yield "Other orders under the same costs, which keep no more activations on any rank:"
    yield Table(["schedule", "step", "gain", "bubble", "activations"], rows)
    if found.best is now:
        yield f"No order is more than {NOTABLE:.0%} faster than the one that ran."
    else:
        yield "--best FILE writes the fastest one as a table that torch's runtime reads."
