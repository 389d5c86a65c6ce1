"""`pipeflow diff` of two plans: where the time of their steps and their memory differ. Reads what `pipeflow plan
--json` printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeflow.cli.breakdowns import breakdown_svg
from pipeflow.cli.outputs import show, wrapped
from pipeflow.core.errors import UsageError
from pipeflow.core.files import read_text
from pipeflow.core.json_values import parse
from pipeflow.core.text import bytes_text, number, percent, seconds_text
from pipeflow.draw.columns import difference_text
from pipeflow.planning.breakdown import MEANINGS, Breakdown

if TYPE_CHECKING:
    from pipeflow.draw import Table

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
        layout = found["layouts"][0] if "layouts" in found else found
        if not layout["step_seconds"]:
            raise UsageError(f"{path} has a plan without seconds: plan it again with --device")
        sizes = {name: value for name, value in {**layout, **layout.get("layout", {})}.items() if name in SIZES}
        devices, device = found["devices"], found["cluster"]["device"]["name"]
        words = {"devices": f"{devices} {device}", "schedule": layout["schedule"], **sizes}
        words["microbatches"] = layout["microbatches"]
        times = (layout.get("breakdown") or {"parts": layout["step_parts"]})["parts"]
        speed = layout["tokens_per_second"]
        return cls(path, words, times, layout["peak_parts"], layout["step_seconds"], speed)


def is_plan(path: str) -> bool:
    """Whether a file has a plan. Raises UsageError for a file that cannot be read or is no JSON."""
    return path.endswith(".json") and os.path.isfile(path) and _has_plan(parse(read_text(path)))


def _has_plan(content: object) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return False
    layouts = content.get("layouts", [content])
    return bool(layouts) and all("peak_parts" in each and "step_seconds" in each for each in layouts)


def run_plans(names: list[str], svg: str | None) -> int:
    """Prints two plans beside each other, or writes their steps as bars into an SVG file."""
    first, second = map(SavedPlan.read, names)
    if svg is not None:
        from pipeflow.cli.files import write

        write({svg: breakdown_svg([(each.name, Breakdown(each.times, {}, 0)) for each in (first, second)])})
        return 0
    times = _table("step", first, second, lambda plan: {"step": plan.seconds, **plan.times}, seconds_text)
    memory = _table("peak", first, second, lambda plan: {"peak": sum(plan.bytes.values()), **plan.bytes}, bytes_text)
    show(*_layouts(first, second), "", times, "", memory, "", *wrapped(_summary(first, second)))
    return 0


def _layouts(first: SavedPlan, second: SavedPlan) -> Iterator[Table]:
    """The two layouts in a table, with their differences."""
    from pipeflow.draw import Table

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
    from pipeflow.draw import Table

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
