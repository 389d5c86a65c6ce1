"""Views: what the page shows of the schedules of a state: their timelines, how they differ, what each rank does in a
range of time, the plot of all schedules, and what a step of a model takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Condition
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.analysis.difference import moved_actions
from pipeflow.core.analysis.measures import Measures, RankWindow
from pipeflow.core.analysis.measures import window as ranks_in
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import bytes_text, number, percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit, amount_text, heading, peaks, unit_of
from pipeflow.draw.columns import COLUMNS, MeasureChange, changes, grouped, plot
from pipeflow.draw.page.timeline_data import table
from pipeflow.draw.page.timeline_page import parts
from pipeflow.draw.svg_charts import scatter_svg
from pipeflow.planning.estimate import plan as estimated
from pipeflow.planning.rank_memory import RankPlan
from pipeflow.planning.similar import unpriced
from pipeflow.planning.step_plan import Plan
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.registry import COMPARED, is_searched
from pipeflow.tools.explore.fields import CUSTOM, split
from pipeflow.tools.explore.own_schedule import custom
from pipeflow.tools.explore.state import State

NEARLY = 1 + 1e-9  # the amounts are sums


def above_caps(timeline: Timeline, cap: float | Sequence[float] | None) -> dict[str, Any] | None:
    """The ranks of a timeline that keep more than the cap, one number or one per rank, as JSON values: `ranks`, and
    `said` about them. None if there are none.
    """
    if cap is None:
        return None
    most = peaks(timeline)
    caps = list(cap) if isinstance(cap, Sequence) else [cap] * len(most)
    unit = "" if timeline.saved_bytes else f" {unit_of(timeline)}"
    return _misfit(most, caps, "the memory cap", lambda amount: amount_text(timeline, amount), unit)


def above_device(plan: Plan, memory: float, device: str) -> dict[str, Any] | None:
    """The same for the ranks of a plan and the memory of their device."""
    most = [rank.peak_bytes + plan.outside_bytes for rank in plan.ranks]
    return _misfit(most, [memory] * len(most), f"the room on {device}", bytes_text, "")


def _misfit(
    needed: Sequence[float], room: Sequence[float], limit: str, text: Callable[[float], str], unit: str
) -> dict[str, Any] | None:
    ranks = [rank for rank, (one, other) in enumerate(zip(needed, room, strict=True)) if one > other * NEARLY]
    if not ranks:
        return None
    worst = max(ranks, key=lambda rank: needed[rank] - room[rank])
    many = f"{len(ranks)} of {len(needed)} ranks {'is' if len(ranks) == 1 else 'are'} above {limit}"
    most = f"rank {worst}, {text(needed[worst])}{unit} of {text(room[worst])}"
    return {"ranks": ranks, "said": f"Does not fit: {many}; worst: {most}."}


Moved = tuple[frozenset[Any], ...] | None


def beside(schedules: Sequence[Schedule], drawn: Sequence[Timeline], unit: Unit) -> dict[str, Any]:
    """The differences of the timelines from the first one.

    `moved` has per timeline and rank the actions that stand at another place of their row, with blanks between, and
    None per timeline whose rows cannot be compared. `differences` is a table of measures as HTML; empty if there is one
    timeline alone.
    """
    first, *others = schedules
    moved = [moved_actions(first, other) for other in others]
    texts = [each and [" ".join(sorted(map(str, actions))) for actions in each] for each in moved]
    return {"moved": [None, *texts], "differences": _differences_table(schedules, drawn, moved, unit) if others else ""}


def _differences_table(
    schedules: Sequence[Schedule], drawn: Sequence[Timeline], moved: Sequence[Moved], unit: Unit
) -> str:
    measures = [Measures.of(*each) for each in zip(schedules, drawn, strict=True)]
    found = [changes(measures[0], other, unit) for other in measures[1:]]
    titles = dict.fromkeys(title for each in found for title in each)
    before = {title: change.before for each in found for title, change in each.items()}
    rows = [[title, before[title], *(_cell(each.get(title)) for each in found)] for title in titles]
    rows.append(["actions at another place", "", *map(_count, moved, drawn[1:])])
    head = ["", *(timeline.name for timeline in drawn)]
    return table(f"Compared with {drawn[0].name}", head, rows)


def _cell(change: MeasureChange | None) -> str:
    if change is None:
        return ""
    if not change.part:
        return f"{change.after} ({change.change})"
    return f"{change.after} ({change.change}, {change.part})"


def _count(moved: Moved, timeline: Timeline) -> str:
    if moved is None:
        return "stages are placed differently"
    return f"{sum(map(len, moved))} of {sum(map(len, timeline.rows))}"


LONGEST_WAIT = 2.0  # seconds


class Turns:
    """Lets threads go first. Threads of one process share the processor, so what runs beside a question delays it."""

    def __init__(self) -> None:
        self._first = 0
        self._changed = Condition()

    @contextmanager
    def first(self) -> Iterator[None]:
        """While this is open, whoever waits waits."""
        with self._changed:
            self._first += 1
        try:
            yield
        finally:
            with self._changed:
                self._first -= 1
                self._changed.notify_all()

    @property
    def free(self) -> bool:
        """Whether nobody goes first."""
        return not self._first

    def wait(self) -> None:
        """Returns when nobody goes first, or after some time, so that it is never left out."""
        with self._changed:
            self._changed.wait_for(lambda: self.free, LONGEST_WAIT)


TURNS = Turns()
"""The turns of the questions of a page."""


def plan(fields: Mapping[str, str]) -> dict[str, Any]:
    """The parts of the page for the schedules of a state, and what else there is to say about them:

    - schedules, own, titles: their names; the same with options of their own, and for people.
    - moved, differences: how they differ from the first one.
    - headline: the conclusion, as `headline` says.
    - misfits: for each timeline the ranks that keep more than the memory cap, or None.
    - priced_by: the file whose measured costs are used; empty if there is none.
    - custom: the facts about the reader's own schedule, if it is among them; it is drawn also if it cannot run.

    Raises UsageError for fields that are wrong, and for a schedule that cannot be made or, if it has a name, run.
    """
    with TURNS.first():
        state = State.of(fields)
        own = custom(state) if CUSTOM in state.schedules else None
        drawn = tuple(_timeline(state, name, own) for name in state.schedules)
        cap = state.options.get("bytes_cap" if drawn[0].saved_bytes else "memory_cap")
        made = [state.schedule(name) for name in state.schedules]
        names: dict[str, Any] = {"schedules": state.schedules, "own": [*map(state.with_own_options, state.schedules)]}
        names["titles"] = [each.name for each in drawn]
        priced = {"priced_by": "" if state.prices.read is None else state.prices.read.name}
        shown = parts(drawn, state.unit, cap)._asdict()
        misfits = {"misfits": [above_caps(each, cap) for each in drawn], "headline": headline(state, drawn, own)}
        answer = shown | misfits | names | beside(made, drawn, state.unit) | priced
    return answer if own is None else answer | {"custom": own}


COMPARED_FIRST = "1f1b", "zb-v"  # the known one, and the one with the least idle time under even costs


def headline(state: State, drawn: Sequence[Timeline], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the timelines show, as JSON values. Of the reader's `own` schedule, if it is not sound, it says only that:

    - idle, said: how much of the step the busiest rank of the first timeline is idle; and a sentence about it.
    - other: the name of the schedule to compare it with: the second one, or one with another bubble; empty if none is.
    - sides: what `before` and `after` show, the worse one before; None if there is no other one.
    - first: which of the two the first timeline is; empty if there is no other one.
    """
    first = drawn[0]
    idle, said = _idle(first), f"waits for {percent(first.makespan_bubble_ratio)} of the step."
    told: dict[str, Any] = {"idle": idle, "said": f"The busiest rank of {first.name} {said}"}
    told |= {"other": "", "sides": None, "first": ""}
    if own is not None and not own["sound"]:
        return told | {"idle": "not sound", "said": f"What is wrong with {CUSTOM} is listed below."}
    other, beside = _other(state, drawn)
    if beside is None:
        return told
    before = first.makespan_bubble_ratio >= beside.makespan_bubble_ratio
    worse, better = (first, beside) if before else (beside, first)
    told["other"], told["first"] = other, "before" if before else "after"
    told["sides"] = {"before": f"{worse.name}: {_idle(worse)}", "after": f"{better.name}: {_idle(better)}"}
    if len(drawn) > 1 and _idle(worse) != _idle(better):
        told["idle"] = f"{_idle(worse).removesuffix(' idle')} \N{RIGHTWARDS ARROW} {_idle(better)}"
    change = beside.makespan / first.makespan - 1 if first.makespan else 0.0
    differs = f"{percent(abs(change))} {'more' if change > 0 else 'less'} time"
    told["said"] += f" {beside.name} takes {'as long' if abs(change) < 5e-4 else differs}."
    return told


def _idle(timeline: Timeline) -> str:
    """The bubble in whole percent, or with a digit if it is less than one."""
    bubble = timeline.makespan_bubble_ratio
    return f"{bubble:.0%} idle" if bubble >= 0.01 or not bubble else f"{percent(bubble)} idle"


def _other(state: State, drawn: Sequence[Timeline]) -> tuple[str, Timeline | None]:
    """The schedule to compare the first timeline with, on as many ranks."""
    if len(drawn) > 1:
        return (state.schedules[1], drawn[1]) if len(drawn[1].rows) == len(drawn[0].rows) else ("", None)
    if split(state.schedules[0])[0] not in SCHEDULES:
        return "", None
    for name in COMPARED_FIRST:
        with suppress(UsageError):
            state.require_size([*state.schedules, name])
            found = state.timeline(name)
            if abs(found.makespan_bubble_ratio - drawn[0].makespan_bubble_ratio) > 1e-6:
                return name, found
    return "", None


def _timeline(state: State, name: str, own: dict[str, Any] | None) -> Timeline:
    if name != CUSTOM or own is None:
        return state.timeline(name)
    drawn = state.draft()
    notes = [state.rows_file, "" if own["sound"] else "stuck" if drawn.stuck else "unsound"]
    said = ", ".join(filter(None, notes))
    return replace(drawn.timeline, name=f"{CUSTOM} ({said})" if said else CUSTOM)


CANDIDATES = 20  # orders that a search tries for the plot
LARGEST_COMPARED = 8_192  # stages times microbatches of each schedule, so that all of them take seconds at most
WIDEST = 960  # pixels


def compare(fields: Mapping[str, str]) -> dict[str, Any]:
    """The plot as SVG, the measures of the schedules that are in it, and lines about the others.

    A search that is not shown ends early, and a line says so. Raises UsageError for fields that are wrong.
    """
    state = State.of(fields)
    found, refused = measured(state)
    notes = [
        f"{name}: the best of {CANDIDATES} orders; choose it to search longer" for name in found if _short(state, name)
    ]
    notes += [f"left out: {line}" for line in grouped(refused)]
    width = min(int(fields.get("width") or WIDEST), WIDEST)
    return {
        "plot": scatter_svg(*plot(found), width=width, marked=state.schedules) if found else "",
        "notes": notes,
        "measures": {
            name: {
                "said": _said(each),
                "bubble": each.makespan_bubble_ratio,
                "makespan": each.makespan,
                "activations": each.peak_activations,
                "bytes": each.peak_bytes,
            }
            for name, each in found.items()
        },
    }


def measured(state: State) -> tuple[dict[str, Measures], dict[str, str]]:
    """The measures of every schedule that is compared and of all that is shown, and for those that cannot be made in
    this size the reason.
    """
    found, refused = {}, {}
    for name in dict.fromkeys([*COMPARED, *state.schedules]):
        TURNS.wait()
        candidates = CANDIDATES if _short(state, name) else None
        try:
            if name not in state.schedules:
                state.require_size([name], LARGEST_COMPARED)
            found[name] = state.measures(name, candidates)
        except UsageError as error:
            refused[name] = " ".join(str(error).split())
    return found, refused


def _short(state: State, name: str) -> bool:
    return is_searched(name) and name not in state.schedules


def _said(measures: Measures) -> str:
    """The two coordinates of a point in words."""
    kept = COLUMNS["activations" if measures.peak_bytes is None else "bytes"]
    return ", ".join(f"{' '.join(each.title.split())} {each.cell(measures)}" for each in (COLUMNS["bubble"], kept))


def window(fields: Mapping[str, str]) -> dict[str, Any]:
    """A title, and a table per schedule, as HTML.

    Raises UsageError for fields that are wrong, and for a schedule that cannot be made or cannot run.
    """
    state = State.of(fields)
    drawn = [state.draft().timeline if name == CUSTOM else state.timeline(name) for name in state.schedules]
    first, last = state.selected
    end = min(last, max(each.makespan for each in drawn))
    whole = first == 0 and math.isinf(last)
    part = "the whole step" if whole else f"{state.unit.text(first)} to {state.unit.text(end)}"
    return {"title": f"Ranks in {part}", "tables": "".join(_window_table(each, state) for each in drawn)}


def _window_table(timeline: Timeline, state: State) -> str:
    ranks = ranks_in(timeline, *state.selected)
    kinds = [kind for kind in Kind if any(kind in each.busy for each in ranks)]
    head = ("rank", *(DATAFLOW[kind].name for kind in kinds), "idle", "busy", f"peak {unit_of(timeline)}")
    lines = [[f"rank {rank}", *_line(timeline, each, kinds, state.unit)] for rank, each in enumerate(ranks)]
    if len(ranks) > 1:
        lines.append(["all ranks", *_line(timeline, _all(ranks), kinds, state.unit)])
    return table(heading(timeline), head, lines)


def _line(timeline: Timeline, rank: RankWindow, kinds: list[Kind], unit: Unit) -> Iterator[str]:
    yield from (unit.text(rank.busy.get(kind, 0.0)) for kind in kinds)
    yield unit.text(rank.idle)
    yield percent(rank.utilisation)
    yield amount_text(timeline, rank.peak)


def _all(ranks: tuple[RankWindow, ...]) -> RankWindow:
    """The sums over the ranks, the mean utilisation, and the highest peak."""
    busy = {kind: sum(each.busy.get(kind, 0.0) for each in ranks) for kind in Kind}
    computing, idle = (sum(getattr(each, name) for each in ranks) for name in ("computing", "idle"))
    mean = sum(each.utilisation for each in ranks) / len(ranks)
    return RankWindow(busy, computing, idle, mean, max(each.peak for each in ranks))


MEMORY = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "recomputed", "transfers"),
    "gathered": ("gathered",),
    "other": ("backward", "buffers", "step"),
    "allocator": ("allocator",),
}
"""The columns of a device's memory: each adds up some of `RankPlan.peak_parts`."""
PARTS = ("compute", "tensor", "sharding", "bubble", "transfer", "reduction", "optimizer")


def model(fields: Mapping[str, str]) -> dict[str, Any]:
    """Tables of step times and of memory, as HTML, and for each schedule the ranks that do not fit on their device, or
    None; no tables without a model.

    Raises UsageError for fields that are wrong, and for a schedule that cannot be made or cannot run.
    """
    state = State.of(fields)
    prices = state.prices.modelled
    if prices is None or prices.cluster is None:
        return {"tables": "", "misfits": []}
    schedules = [state.schedule(name).without_reductions() for name in state.schedules]
    plans = [estimated(prices.model, each, prices.setup, cluster=prices.cluster) for each in schedules]
    memory, device = prices.cluster.usable_bytes, prices.cluster.device.name
    tables = [_times(plans, device), *(_memory(each, memory) for each in plans)]
    return {"tables": "".join(tables), "misfits": [above_device(each, memory, device) for each in plans]}


def _times(plans: list[Plan], device: str) -> str:
    head = ("step", "seconds", *PARTS, "tokens/s")
    caption = f"Time of a step on {plans[0].devices} x {device}, by what it is made of"
    if missing := unpriced(plans[0].model, plans[0].setup):
        caption += f"; not priced: {'; '.join(missing)}"
    return table(caption, head, [[*_time(each)] for each in plans])


def _time(plan: Plan) -> Iterator[str]:
    parts, seconds = plan.step_parts, plan.step_seconds or 0.0
    yield heading(plan.timeline)
    yield number(seconds)
    for part in PARTS:
        yield percent(getattr(parts, part) / seconds)
    yield f"{plan.tokens_per_second or 0.0:,.0f}"


def _memory(plan: Plan, memory: float) -> str:
    memory -= plan.outside_bytes
    head = ("rank", "layers", *MEMORY, "sum", f"of {bytes_text(memory)}")
    caption = f"Memory of a device, {heading(plan.timeline)}"
    return table(caption, head, [[*_rank(each, memory)] for each in plan.ranks])


def _rank(rank: RankPlan, memory: float) -> Iterator[str]:
    yield f"rank {rank.rank}"
    yield str(rank.layers)
    for column in MEMORY.values():
        yield bytes_text(sum(rank.peak_parts[part] for part in column))
    yield bytes_text(rank.peak_bytes)
    yield "fits" if rank.peak_bytes <= memory else f"{bytes_text(rank.peak_bytes - memory)} too much"
