"""What is shown of plans: where the time of a step goes, pictures of the layouts that a search found, two printed plans
compared, and other schedules under the costs of a measured step.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.files import is_number, parse, read_text
from pipeflow.core.text import bytes_text, number, percent, seconds_text
from pipeflow.core.timeline import Timeline
from pipeflow.draw import Axis, Bar, Point, Table, bars_svg, scatter_svg
from pipeflow.draw.captions import Unit
from pipeflow.draw.columns import difference_text
from pipeflow.planning.layout import Layout
from pipeflow.planning.layouts import Layouts, Ranked
from pipeflow.planning.replanning import Candidate, Replan, replan
from pipeflow.planning.step_plan import Plan
from pipeflow.planning.time_shares import MEANINGS, Breakdown, breakdown
from pipeflow.tools.cli.options import Parser
from pipeflow.tools.cli.outputs import doing, show, wrapped, write

LONGEST = 24  # letters of a bar in a terminal


def add_breakdown(command: Parser) -> None:
    """Adds the option --breakdown."""
    help_ = "where the time of a step goes, as a table; with --svg as a picture of stacked bars"
    command.add_argument("--breakdown", action="store_true", help=help_)


def require_seconds(arguments: argparse.Namespace) -> None:
    """Raises UsageError for --breakdown without a cluster, whose plan has no seconds."""
    if arguments.breakdown and arguments.device is None and arguments.cluster is None:
        raise UsageError("--breakdown tells where seconds go: say on which device, with --device or --cluster")


def for_programs(found: Plan) -> dict[str, Any] | None:
    """The breakdown as JSON has it; None for a plan without seconds."""
    return None if found.step_parts is None else asdict(breakdown(found))


def breakdown_table(found: Plan) -> Iterator[Table | str]:
    """The parts of one step with their shares, drawn as bars, and what each part is."""
    parts = breakdown(found)
    most = max(parts.parts.values())
    rows = [
        [
            name,
            seconds_text(seconds),
            percent(seconds / parts.seconds),
            seconds_text(parts.hidden[name]) if name in parts.hidden else "",
            ("#" * max(1, round(LONGEST * seconds / most))).ljust(LONGEST),
        ]
        for name, seconds in parts.parts.items()
    ]
    yield Table(["", "time", "share", "hidden" if parts.hidden else "", ""], rows)
    yield ""
    yield f"Of rank {parts.rank}, the busiest one; what runs beside computations is hidden and adds nothing."
    yield from (f"  {name}: {MEANINGS[name]}" for name in parts.parts)


def beside_each_other(found: Sequence[Plan]) -> Table:
    """The parts of several steps, a column for each."""
    every = [breakdown(each).parts for each in found]
    names = [name for name in MEANINGS if any(name in parts for parts in every)]
    rows = [[name, *(seconds_text(parts[name]) if name in parts else "-" for parts in every)] for name in names]
    return Table(["", *map(str, range(1, len(every) + 1))], rows)


def breakdown_svg(bars: Sequence[tuple[str, Breakdown]]) -> str:
    """The picture of named breakdowns, one below the other."""
    return bars_svg(
        "Where the time of a step goes", [Bar(name, each.parts) for name, each in bars], [*MEANINGS], seconds_text
    )


MADE_FOR = (
    "cost",
    "bytes_cap",
    "candidates",
)  # options that a search for layouts gives to an order that is searched for


def schedule_text(layout: Layout) -> str:
    """The schedule with its options, in a few letters: `x6` means six chunks."""
    if layout.pipeline == 1:
        return "no pipeline"
    options = {name: value for name, value in layout.options.items() if name not in MADE_FOR}
    chunks = options.pop("chunks", None)
    named = layout.schedule if chunks is None else f"{layout.schedule} x{chunks}"
    return ", ".join([named, *(f"{name} {value}" for name, value in options.items())])


def plotted(found: Layouts) -> str:
    """The plot of step time against memory, as SVG."""
    points = [
        Point(named(place, each), each.plan.peak_bytes, each.step_seconds)
        for place, each in enumerate(found.ranked, start=1)
    ]
    return scatter_svg(
        points, Axis("memory of the fullest device", bytes_text, 1024), Axis("time of a step (s)", number)
    )


def bars_of(found: Layouts) -> str:
    """The parts of the steps as bars, as SVG."""
    parts = [(named(place, each), breakdown(each.plan)) for place, each in enumerate(found.ranked, start=1)]
    return breakdown_svg(parts)


def named(place: int, each: Ranked) -> str:
    """A layout by its place, schedule and sizes."""
    further = f"x{each.layout.context}" * (each.layout.context > 1)
    return f"{place}: {schedule_text(each.layout)} {sizes_text(each.layout)}{further}"


def sizes_text(layout: Layout) -> str:
    """The sizes that every layout has: tensor, pipeline and data."""
    return f"{layout.tensor}x{layout.pipeline}x{layout.data}"


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
        """Reads a plan, or the first layout of a search. Raises UsageError for a file that has none, or no seconds."""
        found = parse(read_text(path))
        if not _has_plan(found):
            raise UsageError(f"{path} has no plan: print one with pipeflow plan MODEL --device DEVICE --json")
        try:
            return cls._of(path, found)
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
        devices, device = found["devices"], found["cluster"]["device"]["name"]
        words = {"devices": f"{devices} {device}", "schedule": layout["schedule"], **sizes}
        words["microbatches"] = layout["microbatches"]
        times = dict((layout.get("breakdown") or {"parts": layout["step_parts"]})["parts"])
        memory, numbers = dict(layout["peak_parts"]), (layout["step_seconds"], layout["tokens_per_second"])
        if not all(map(is_number, (*times.values(), *memory.values(), *numbers))):
            raise TypeError("a number is missing")
        return cls(path, words, times, memory, *numbers)


def is_plan(path: str) -> bool:
    """Whether a file has a plan. Raises UsageError for a file that cannot be read or is no JSON."""
    return path.endswith(".json") and os.path.isfile(path) and _has_plan(parse(read_text(path)))


def _has_plan(content: object) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return False
    layouts = content.get("layouts", [content])
    return isinstance(layouts, list) and bool(layouts) and all(map(_is_layout, layouts))


def _is_layout(content: object) -> bool:
    return isinstance(content, dict) and "peak_parts" in content and "step_seconds" in content


def run_plans(names: list[str], svg: str | None) -> int:
    """Prints two plans beside each other, or writes their steps as bars into an SVG file."""
    first, second = map(SavedPlan.read, names)
    if svg is not None:
        write({svg: breakdown_svg([(each.name, Breakdown(each.times, {}, 0)) for each in (first, second)])})
        return 0
    times = _table("step", first, second, lambda plan: {"step": plan.seconds, **plan.times}, seconds_text)
    memory = _table("peak", first, second, lambda plan: {"peak": sum(plan.bytes.values()), **plan.bytes}, bytes_text)
    show(*_layouts(first, second), "", times, "", memory, "", *wrapped(_summary(first, second)))
    return 0


def _layouts(first: SavedPlan, second: SavedPlan) -> Iterator[Table]:
    """The two layouts in a table, with their differences."""
    names = [name for name in ("devices", "schedule", *SIZES, "microbatches") if name in first.words | second.words]
    rows = []
    for name in names:
        both = [plan.words.get(name, USUAL.get(name, "-")) for plan in (first, second)]
        if both != [USUAL.get(name)] * 2:
            rows.append([name.replace("_", " "), *map(str, both), "" if both[0] == both[1] else "differs"])
    yield Table(["", first.name, second.name, ""], rows)


def _table(
    whole: str,
    first: SavedPlan,
    second: SavedPlan,
    parts: Callable[[SavedPlan], Mapping[str, float]],
    text: Callable[[float], str],
) -> Table:
    """The parts of both plans and by how much they differ, the whole first. Those of a time are in MEANINGS's order."""
    before, after = parts(first), parts(second)
    order = MEANINGS if whole == "step" else ()
    names = [name for name in dict.fromkeys([whole, *order, *before, *after]) if before.get(name) or after.get(name)]
    rows = []
    for name in names:
        one, other = before.get(name, 0.0), after.get(name, 0.0)
        rows.append([name, text(one), text(other), *difference_text(one, other, text)])
    return Table(["", first.name, second.name, "change", ""], rows)


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


def run_replan(arguments: argparse.Namespace) -> int:
    """Prints what other schedules would gain, and writes the best one where --csv says."""
    text = read_text(arguments.measured)
    try:
        measured = Timeline.from_json(text)
    except UsageError as error:
        raise UsageError(f"{arguments.measured}: {error}") from None
    with doing("planning"):
        found = replan(measured)
    if arguments.csv is not None:
        write({arguments.csv: found.best.schedule.to_csv()})
    if arguments.json:
        print(json.dumps(_replan_for_programs(found)))
    else:
        show(*_replan_heading(found), "", _replan_table(found), "", *_advice(found))
    return 0


def _replan_for_programs(found: Replan) -> dict[str, object]:
    def one(each: Candidate) -> dict[str, object]:
        return {
            "schedule": each.schedule.name,
            "step_seconds": each.timeline.makespan,
            "gain": found.gain(each),
            "peak_activations": each.timeline.peak_activations,
            "fits": each.fits,
        }

    return {
        "measured_seconds": found.measured.makespan,
        "now": one(found.now),
        "best": one(found.best),
        "candidates": [one(each) for each in found.candidates],
    }


def _replan_heading(found: Replan) -> Iterator[str]:
    unit, planned, measured = _unit(found), found.now.timeline.makespan, found.measured.makespan
    yield f"{found.measured.name}: measured {unit.text(measured)}, planned from its own costs {unit.text(planned)}"
    yield "The table compares the schedules with the same stages on the same ranks, under the measured costs."


def _unit(found: Replan) -> Unit:
    return Unit.of([found.measured])


def _replan_table(found: Replan) -> Table:
    unit = _unit(found)
    rows = [
        [
            each.schedule.name,
            unit.text(each.timeline.makespan),
            percent(found.gain(each)),
            number(max(each.timeline.peak_activations)),
            "" if each.fits else "more",
        ]
        for each in found.candidates
    ]
    return Table(["schedule", "step", "gain", "activations", "memory"], rows)


def _advice(found: Replan) -> Iterator[str]:
    best = found.best
    if best is found.now:
        yield f"No schedule within the same memory is faster than {found.measured.name}."
        return
    yield f"{best.schedule.name} would save {percent(found.gain(best))} of the step within the same memory."
    yield "--csv FILE writes it; Schedule.from_csv reads it, and execute_pipeline(schedule=...) runs it."
