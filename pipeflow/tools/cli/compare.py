"""`pipeflow compare`: the measures of several schedules under the same costs. `pipeflow diff`: two schedules, or a
simulated and a measured step: the moves, the measures, and both drawn; two plans of `pipeflow plan --json`: where their
time and their memory differ.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeflow import draw
from pipeflow.core.analysis.difference import Difference, differences, has_halves, without_halves
from pipeflow.core.analysis.measures import Measures
from pipeflow.core.errors import UsageError
from pipeflow.core.files import is_number, parse, read_text
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import bytes_text, listed, number, percent, seconds_text
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit
from pipeflow.draw.columns import COLUMNS, Column, changes, columns_in, difference_text, grouped, plot
from pipeflow.planning.estimate import MEANINGS, Breakdown
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.registry import COMPARED
from pipeflow.tools.cli.conclusions import change_said, compared_said
from pipeflow.tools.cli.options import UNITS, Commands, add_costs, add_sizes, add_units, schedule_name
from pipeflow.tools.cli.outputs import add_outputs, files_named, show, wrapped, write, write_drawings
from pipeflow.tools.cli.requests import Compared, refuse, refuse_all_but, refuse_costs

Found = dict[str, Measures]
WRITTEN = "for --animate, whose order is that of the names"
TABLE = tuple(name for name in COLUMNS if name != "span")


def add_compare(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser("compare", help="compare schedules under the same costs")
    add_sizes(command)
    add_costs(command)
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
    group.add_argument("--animate", metavar="FILE", help="write the schedules in motion as SVG (-: standard output)")
    group.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run_compare)


def run_compare(arguments: argparse.Namespace) -> int:
    """Measures each schedule and prints the result."""
    paths = files_named(arguments, "svg", "animate")
    if arguments.json and (name := next((name for name, path in paths.items() if path == "-"), None)):
        raise UsageError(f"standard output can take one output, not --json and --{name}")
    if paths and not arguments.json:
        refuse(arguments, ("sort",), "for --svg, which has no order" if "svg" in paths else WRITTEN)
    names = list(dict.fromkeys(arguments.schedules)) or list(COMPARED)
    found, refused, timelines = _measured(names, arguments)
    if not found:
        raise UsageError("; ".join(grouped(refused)))
    found = _sorted(found, arguments.sort)
    if paths:
        drawings = {"svg": lambda: draw.scatter_svg(*plot(found)), "animate": lambda: draw.animated_svg(timelines)}
        write({path: drawings[name]() for name, path in paths.items()})
    if arguments.json:
        schedules = {name: asdict(measures) for name, measures in found.items()}
        print(json.dumps({"schedules": schedules, "refused": refused}))
    elif not paths:
        _show(found, refused, columns_in(Unit.of(timelines)))
    return 0


def _measured(names: list[str], arguments: argparse.Namespace) -> tuple[Found, dict[str, str], list[Timeline]]:
    """The measures of the schedules that can be made with these options, the reasons why the others cannot, and the
    timelines. A name that is unknown, or a file that does not fit, is an error.
    """
    found, refused = {}, {}
    timelines, schedules = [], []
    compared = Compared.of(names, arguments)
    for name in names:
        try:
            schedule, timeline = compared.both(name)
            timelines.append(timeline)
            schedules.append(schedule)
            found[name] = Measures.of(schedule, timeline)
        except UsageError as error:
            if name not in SCHEDULES:
                raise
            refused[name] = " ".join(str(error).split())
    if schedules:
        refuse_costs(compared.costs, *schedules)
    return found, refused, timelines


def _sorted(found: Found, by: str) -> Found:
    """The schedules, least first. Equal ones are sorted by makespan, then as in the registry."""

    def key(name: str) -> tuple[float, ...]:
        return tuple(round(COLUMNS[column].of(found[name]) or 0.0, 9) for column in (by, "makespan"))

    names = sorted(found) if by == "name" else sorted(found, key=key)
    return {name: found[name] for name in names}


def _show(found: Found, refused: Mapping[str, str], columns: Mapping[str, Column]) -> None:
    shown = [
        column
        for column in map(columns.__getitem__, TABLE)
        if any(column.of(each) is not None for each in found.values())
    ]
    same = [column for column in shown if len(found) > 1 and len({column.cell(each) for each in found.values()}) == 1]
    first = next(iter(found.values()))
    notes = [f"{' '.join(column.title.split())}: {column.cell(first)} for all schedules" for column in same]
    notes += [f"left out: {line}" for line in grouped(refused)]
    table = _compared_table(found, [column for column in shown if column not in same])
    said = compared_said(found, columns["makespan"].text)
    show(*said, "", table, *[""] * bool(notes), *notes, "", draw.Scatter(*plot(found)))


def _compared_table(found: Found, columns: list[Column]) -> draw.Table:
    best = set()
    for index, column in enumerate(columns, start=1):
        cells = [column.of(measures) for measures in found.values()]
        least = min(cell for cell in cells if cell is not None)
        texts = [column.cell(measures) for measures in found.values()]
        best |= {(row, index) for row, text in enumerate(texts) if text == column.text(least)}
    rows = [[name, *(column.cell(measures) for column in columns)] for name, measures in found.items()]
    return draw.Table(["schedule", *(column.title for column in columns)], rows, frozenset(best))


SHOWN_ENTRIES = 4  # how many entries of each kind of difference are written out


def difference_lines(first: Schedule, second: Schedule) -> Iterator[str]:
    """Per rank, the first position at which the rows differ, the actions that moved, and the actions that only one row
    has.
    """
    if first.placement != second.placement:
        yield "The stages are placed differently, so the rows are not compared:"
        yield from (f"{each.name}: {_placed(each)}" for each in (first, second))
        return
    if has_halves(first) != has_halves(second):
        whole, split = (second, first) if has_halves(first) else (first, second)
        yield f"{split.name} splits backwards into I and W: I is matched with the B of {whole.name}, W is ignored."
        first, second = without_halves(first), without_halves(second)
    found = differences(first, second)
    if not any(found):
        yield "Both run the same order on every rank."
        return
    margin = len(f"rank {len(found) - 1}  ")
    for rank, difference in enumerate(found):
        lines = _lines(difference) if difference else iter(["the same"])
        yield f"rank {rank}".ljust(margin) + next(lines)
        yield from (" " * margin + line for line in lines)


def _placed(schedule: Schedule) -> str:
    paths = schedule.placement.paths
    return "; ".join(f"stages on ranks {' '.join(map(str, path[:16]))}{' ...' * (len(path) > 16)}" for path in paths)


def _lines(found: Difference) -> Iterator[str]:
    rows, position = (found.first, found.second), found.position
    ends = [str(row[position]) if position < len(row) else "nothing" for row in rows]
    yield f"position {position}: the first has {ends[0]}, the second {ends[1]}"
    for what, entries in (
        ("moved", [f"{entry} {first} to {second}" for entry, first, second in found.moves]),
        ("only in the first", list(map(str, found.only_first))),
        ("only in the second", list(map(str, found.only_second))),
    ):
        if entries:
            more = f" and {len(entries) - SHOWN_ENTRIES} more" if len(entries) > SHOWN_ENTRIES else ""
            yield f"{what}: {', '.join(entries[:SHOWN_ENTRIES])}{more}"


FORMATS = ("html", "perfetto")  # the formats of `draw` that can hold two timelines


def add_diff(commands: Commands) -> None:
    """Adds the command and its options."""
    help_ = "show how two schedules differ, a plan and a measured step, or two plans"
    command = commands.add_parser("diff", help=help_)
    for add in (add_sizes, add_costs, add_units):
        add(command)
    which = (
        "a name from `pipeflow list`, a CSV file, or in a JSON file a timeline or what `pipeflow plan --json` printed"
    )
    command.add_argument("first", type=schedule_name, metavar="A", help=which)
    command.add_argument("second", type=schedule_name, metavar="B", help="the schedule or timeline to compare it with")
    add_outputs(command, *FORMATS)
    command.add_argument("--svg", metavar="FILE", help="of two plans: write where the time of their steps goes as bars")
    command.set_defaults(run=run_diff)


def run_diff(arguments: argparse.Namespace) -> int:
    """Prints the differences, then both timelines on one time scale."""
    paths = files_named(arguments, *FORMATS)
    names = [arguments.first, arguments.second]
    if (plans := [*map(_is_plan, names)]) == [True, True]:
        if paths:
            raise UsageError(f"--{min(paths)} draws schedules, not two plans: use --svg")
        refuse_all_but(arguments, ("first", "second", "svg"), "with two plans, which are as they were printed")
        return _diff_plans(names, arguments.svg)
    _require_schedules(names, plans, arguments.svg)
    if paths:
        refuse(arguments, ("memory",), "for files, which always show it")
    if paths.keys() == {"perfetto"}:
        refuse(arguments, UNITS, "with --perfetto, whose unit of time is the second")
    compared = Compared.of(names, arguments)
    schedules, timelines = zip(*map(compared.both, names), strict=True)
    refuse_costs(compared.costs, *schedules)
    measured = [compared.request(name).measured is not None for name in names]
    titles = ("planned", "measured") if measured == [False, True] else ("first", "second")
    unit, factor = arguments.unit, arguments.factor
    if paths:
        named = (replace(each, name=f"{title}: {each.name}") for title, each in zip(titles, timelines, strict=True))
        write_drawings(paths, *named, unit=unit, factor=factor)
        return 0

    lines = difference_lines(*schedules)
    written, (first, second) = Unit.of(timelines, unit, factor), timelines
    one, other = titles if first.name == second.name else (first.name, second.name)
    said = change_said(one, first.makespan, other, second.makespan, written.text)
    table = _changes_table(names, schedules, timelines, written)
    picture = draw.Comparison(timelines[0], timelines[1], unit, factor, titles, arguments.memory)
    show(said, *lines, "", table, *_ratio(timelines, measured), "", picture)
    return 0


def _require_schedules(names: list[str], plans: list[bool], svg: str | None) -> None:
    if any(plans):
        raise UsageError(f"{names[plans.index(True)]} is a plan: compare it with another one of pipeflow plan --json")
    if svg is not None:
        raise UsageError("--svg is for two plans; for schedules there are --html and --perfetto")


def _changes_table(
    names: list[str], schedules: Sequence[Schedule], timelines: Sequence[Timeline], unit: Unit
) -> draw.Table:
    first, second = map(Measures.of, schedules, timelines)
    rows = [[title, *change] for title, change in changes(first, second, unit).items()]
    return draw.Table(["", *names, "change", ""], rows)


def _ratio(timelines: Sequence[Timeline], measured: list[bool]) -> list[str]:
    """The ratio of the planned to the measured makespan, if one timeline was measured."""
    if measured[0] == measured[1]:
        return []
    planned, happened = reversed(timelines) if measured[0] else timelines
    if not happened.makespan:
        return []
    return ["", f"planned / measured: {planned.makespan / happened.makespan:.3f}"]


SIZES = ("pipeline", "tensor", "data", "context", "expert", "microbatch_size", "zero", "checkpoint", "sequence")
USUAL = {"context": 1, "expert": 1, "zero": 0, "checkpoint": "none"}  # sizes that are not told where neither has others


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan that was printed as JSON.

    Attributes:
        name: of its file.
        words: what is planned, by short names.
        times: seconds per part of the step.
        bytes: bytes per part of the fullest device's memory.
        seconds, speed: of a step, and its tokens per second.
    """

    name: str
    words: dict[str, object]
    times: dict[str, float]
    bytes: dict[str, float]
    seconds: float
    speed: float

    @classmethod
    def read(cls, path: str) -> SavedPlan:
        """Reads a plan, or the first layout of a search. Raises UsageError for one without seconds, and for what has
        another shape.
        """
        try:
            return cls._of(path, parse(read_text(path)))
        except (KeyError, TypeError, AttributeError, IndexError):
            what = "it lacks what such a plan has, or has something else there"
            raise UsageError(f"{path} is no plan of pipeflow plan --json: {what}; print it again") from None

    @classmethod
    def _of(cls, path: str, found: Any) -> SavedPlan:
        """The plan in a JSON value. Raises UsageError for one without seconds, and KeyError, TypeError and such for a
        value of another shape.
        """
        layout = found["layouts"][0] if "layouts" in found else found
        if not layout["step_seconds"]:
            raise UsageError(f"{path} has a plan without seconds: plan it again with --device")
        sizes = {name: value for name, value in {**layout, **layout.get("layout", {})}.items() if name in SIZES}
        groups = found["cluster"].get("groups", [found["cluster"]])
        names = listed([*dict.fromkeys(group["device"]["name"] for group in groups)])
        words = {"devices": f"{found['devices']} {names}", "schedule": layout["schedule"], **sizes}
        words["microbatches"] = layout["microbatches"]
        times = dict((layout.get("breakdown") or {"parts": layout["step_parts"]})["parts"])
        memory, numbers = dict(layout["peak_parts"]), (layout["step_seconds"], layout["tokens_per_second"])
        if not all(map(is_number, (*times.values(), *memory.values(), *numbers))):
            raise TypeError("a number is missing")
        return cls(path, words, times, memory, *numbers)


def _is_plan(path: str) -> bool:
    """Whether a file has a plan. Raises UsageError for a file that cannot be read or is no JSON."""
    content = parse(read_text(path)) if path.endswith(".json") and os.path.isfile(path) else None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return False
    layouts = content.get("layouts", [content])
    has_any = isinstance(layouts, list) and bool(layouts)
    return has_any and all(isinstance(each, dict) and {"peak_parts", "step_seconds"} <= {*each} for each in layouts)


def _diff_plans(names: list[str], svg: str | None) -> int:
    """Prints two plans beside each other, or writes their steps as bars into an SVG file."""
    first, second = map(SavedPlan.read, names)
    if svg is not None:
        from pipeflow.tools.cli.plan_reports import breakdowns_svg  # whose tables need rich

        write({svg: breakdowns_svg([(each.name, Breakdown(each.times, {}, 0)) for each in (first, second)])})
        return 0
    plans = (first, second)
    times = _plans_table(plans, [{"step": each.seconds, **each.times} for each in plans], MEANINGS, seconds_text)
    memory = _plans_table(plans, [{"peak": sum(each.bytes.values()), **each.bytes} for each in plans], (), bytes_text)
    show(*wrapped(_summary(first, second)), "", _layouts_table(first, second), "", times, "", memory)
    return 0


def _layouts_table(first: SavedPlan, second: SavedPlan) -> draw.Table:
    """The two layouts in a table, with their differences."""
    names = [name for name in ("devices", "schedule", *SIZES, "microbatches") if name in first.words | second.words]
    rows = []
    for name in names:
        both = [plan.words.get(name, USUAL.get(name, "-")) for plan in (first, second)]
        if both != [USUAL.get(name)] * 2:
            rows.append([name.replace("_", " "), *map(str, both), "" if both[0] == both[1] else "differs"])
    return draw.Table(["", first.name, second.name, ""], rows)


def _plans_table(
    plans: Sequence[SavedPlan],
    parts: Sequence[Mapping[str, float]],
    order: Iterable[str],
    text: Callable[[float], str],
) -> draw.Table:
    """The parts of both plans and by how much they differ: the first one, which is the whole, then those of `order`."""
    before, after = parts
    whole = next(iter(before))
    names = [name for name in dict.fromkeys([whole, *order, *before, *after]) if before.get(name) or after.get(name)]
    rows = []
    for name in names:
        one, other = before.get(name, 0.0), after.get(name, 0.0)
        rows.append([name, text(one), text(other), *difference_text(one, other, text)])
    return draw.Table(["", *(each.name for each in plans), "change", ""], rows)


def _summary(first: SavedPlan, second: SavedPlan) -> str:
    """The change of the step and the parts that have most of it."""
    more = second.seconds - first.seconds
    changes: dict[str, Any] = {
        name: second.times.get(name, 0.0) - first.times.get(name, 0.0) for name in first.times | second.times
    }
    same_way = sorted((name for name in changes if changes[name] * more > 0), key=lambda name: -abs(changes[name]))
    most = ", ".join(
        f"{name} {'+' if changes[name] > 0 else '-'}{seconds_text(abs(changes[name]))}" for name in same_way[:3]
    )
    speed = f"{number(first.speed)} and {number(second.speed)} tokens/s"
    if not most:
        return f"Both steps take the same time: {speed}."
    longer = "longer" if more > 0 else "shorter"
    return f"The second step is {percent(abs(more) / first.seconds)} {longer}, most of it by {most}; {speed}."
