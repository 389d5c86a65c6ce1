"""Pictures of the layouts that a search found, and their names in pictures and tables."""

from __future__ import annotations

from pipeflow.cli.breakdowns import breakdown_svg
from pipeflow.core.text import bytes_text, number
from pipeflow.planning.breakdown import breakdown
from pipeflow.planning.layout import Layout
from pipeflow.planning.layouts import Layouts, Ranked

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
    from pipeflow.draw import Axis, Point, scatter_svg

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
