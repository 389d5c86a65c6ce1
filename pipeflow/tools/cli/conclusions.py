"""Conclusions: the sentence with which the answer of a command begins. Must not contain: the tables below it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from pipeflow.core.analysis.measures import Measures
from pipeflow.core.text import bytes_text, listed, number, percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit
from pipeflow.tools.cli.outputs import wrapped

MARGIN = 8  # columns of a drawing before its first block
SAME = 5e-4  # relative; what differs by less is written alike


def timeline_said(timeline: Timeline, unit: Unit) -> str:
    """How long a step takes, and how much of it the busiest rank is idle."""
    idle = percent(timeline.makespan_bubble_ratio)
    return f"A step takes {unit.text(timeline.makespan)}; its busiest rank is idle for {idle} of it."


def too_dense(timeline: Timeline) -> list[str]:
    """What shows every block, if the terminal has no column for each."""
    columns = shutil.get_terminal_size().columns - MARGIN
    if max(map(len, timeline.rows), default=0) <= columns:
        return []
    return ["--html FILE draws every block, and pipeflow explore plays the step in a browser."]


def change_said(one: str, first: float, other: str, second: float, text: Callable[[float], str]) -> str:
    """How much longer or shorter the step `other` is, which takes `second`. `text` writes a time."""
    change = second / first - 1 if first else 0.0
    if abs(change) < SAME:
        return f"{other} takes as long as {one}: {text(first)}."
    more = f"{percent(abs(change))} {'more' if change > 0 else 'less'} time"
    return f"{other} takes {more} than {one}: {text(second)}, not {text(first)}."


def compared_said(found: Mapping[str, Measures], text: Callable[[float], str]) -> list[str]:
    """Which schedules are fastest, and which keep least. `text` writes a time."""
    fastest = _least({name: each.makespan for name, each in found.items()})
    in_bytes = all(each.peak_bytes is not None for each in found.values())
    kept = {name: (each.peak_bytes if in_bytes else each.peak_activations) or 0.0 for name, each in found.items()}
    leanest = _least(kept)
    amount = bytes_text(kept[leanest[0]]) if in_bytes else f"{number(kept[leanest[0]])} activations"
    takes, keeps = (f"{verb}{'s' * (len(names) == 1)}" for verb, names in (("take", fastest), ("keep", leanest)))
    time = text(found[fastest[0]].makespan)
    return wrapped(f"{_named(fastest)} {takes} the least time, {time}; {_named(leanest)} {keeps} the least, {amount}.")


def _least(numbers: Mapping[str, float]) -> list[str]:
    return [name for name in numbers if numbers[name] <= min(numbers.values()) * (1 + 1e-9)]


def _named(names: list[str]) -> str:
    """Some of the names, and how many more there are."""
    return listed(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def stands_out(text: str | None) -> str:
    """The finding that costs most, as the end of a sentence; None: there is none."""
    return "nothing stands out" if text is None else f"what stands out most: {text.rstrip('.')}"
