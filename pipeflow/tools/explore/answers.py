"""Answers: what the page can ask for, each a function from the fields of a request to JSON values, and the table of
them. Must not contain: the answers that are views of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeflow.core.analysis.measured_step import executed_schedule
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verify import verify
from pipeflow.core.text import percent
from pipeflow.draw.svg_timeline import svg as drawn
from pipeflow.schedules.order_search import search as searched
from pipeflow.schedules.orders.additions import without_optimizer_step
from pipeflow.schedules.registry import recognised
from pipeflow.tools.explore.code import command, python
from pipeflow.tools.explore.fields import CUSTOM, FILE, file_of
from pipeflow.tools.explore.own_schedule import saving
from pipeflow.tools.explore.state import State, custom_fields, texts_in
from pipeflow.tools.explore.tour import reached
from pipeflow.tools.explore.views import compare, model, plan, window
from pipeflow.tools.traces.explanation import median_step, recorded_steps
from pipeflow.tools.traces.files import read_text_of

BUDGET = 2.0  # seconds
LARGEST_SEARCHED = 2048  # stages times microbatches, so that a search can try some orders


def search(fields: Mapping[str, str]) -> dict[str, Any]:
    """A better order than that of the schedule of a state:

    - fields: what to set in the link to see it; None if nothing better was found.
    - makespan, bound, gap: those of the best order; without a better one, of the one that is shown.
    - before: the makespan of the one that is shown; None if the search could not begin with it.
    - text: what came of it, in a sentence or two.

    The search splits backwards into halves, runs pairs one action after the other, and saves memory in the ways that
    the schedule does.

    Raises UsageError for fields that are wrong, for several schedules, and for what no search takes: placements in two
    directions, more than `LARGEST_SEARCHED` stages times microbatches, and a memory cap that no order keeps.
    """
    state = State.of(fields)
    if len(state.schedules) > 1:
        raise UsageError("choose one schedule to search from")
    made = state.schedule(state.schedules[0])
    placement, cost = made.placement, state.prices.cost_model(made.placement)
    if len(placement.paths) > 1:
        raise UsageError("a search takes placements in one direction: begin with a schedule like 1f1b or zb-v")
    if placement.num_stages * made.num_microbatches > LARGEST_SEARCHED:
        raise UsageError(f"a search takes up to {LARGEST_SEARCHED:,} stages times microbatches: use fewer microbatches")
    wrong = _wrong(state, made)
    found = searched(
        placement,
        made.num_microbatches,
        cost,
        memory_cap=state.memory_cap,
        bytes_cap=state.bytes_cap,
        kinds=saving(made),
        budget=BUDGET,
        start=[] if wrong else [without_optimizer_step(made.without_reductions())],
        name=CUSTOM,
    )
    best = state.request(state.schedules[0]).completed(found.schedule)
    makespan = simulate(best, cost).makespan
    before = None if wrong else simulate(made, cost).makespan
    if before is not None and makespan >= before * (1 - 1e-9):
        best, makespan = made, before
        said = f"no better order was found in {BUDGET:g} seconds"
    else:
        was = f"begun anew, since the present order {wrong}" if before is None else f"before: {state.unit.text(before)}"
        said = f"an order that ends at {state.unit.text(makespan)} ({was})"
    gap = makespan / found.lower_bound - 1 if found.lower_bound else 0.0
    return {
        "fields": None if best is made else custom_fields(best),
        "makespan": makespan,
        "before": before,
        "bound": found.lower_bound,
        "gap": gap,
        "text": f"{said}; {_proved(gap, state.unit.text(found.lower_bound))}",
    }


def _wrong(state: State, made: Schedule) -> str:
    """Why a search cannot begin with a schedule; empty if it can."""
    if verify(made):
        return "is unsound"
    if made.is_forward_only:
        return "has no backwards"
    return "keeps more than the memory cap" if verify(made, memory_cap=state.memory_cap) else ""


def _proved(gap: float, bound: str) -> str:
    return "it is proved best" if gap < 1e-9 else f"it is {percent(gap)} above the proved lower bound of {bound}"


def csv(fields: Mapping[str, str]) -> dict[str, Any]:
    """The schedule as a CSV table: `text`. Raises UsageError, as all answers of this file do, for fields that are wrong
    or name several schedules, and for a schedule that cannot be made or cannot run.
    """
    state, name = _one(fields)
    return {"text": state.schedule(name).to_csv()}


def json(fields: Mapping[str, str]) -> dict[str, Any]:
    """The timeline as JSON that `Timeline.from_json` reads: `text`."""
    state, name = _one(fields)
    return {"text": state.timeline(name).to_json()}


def svg(fields: Mapping[str, str]) -> dict[str, Any]:
    """The timeline as an SVG document: `text`."""
    state, name = _one(fields)
    return {"text": drawn(state.timeline(name), unit=state.unit.name, factor=state.unit.factor)}


def code(fields: Mapping[str, str]) -> dict[str, Any]:
    """Code that makes the timeline again: `python`, and the `command` that draws it, which is null if there is none."""
    state, name = _one(fields)
    return {"python": python(state, name), "command": command(state, name)}


def _one(fields: Mapping[str, str]) -> tuple[State, str]:
    """The state and its schedule."""
    state = State.of(fields)
    if len(state.schedules) > 1:
        raise UsageError(f"one schedule can be exported at a time, got {', '.join(state.schedules)}")
    return state, state.schedules[0]


def start(fields: Mapping[str, str]) -> dict[str, Any]:
    """`fields`: what to set in the link to begin with the schedule of a state; `empty`: the same to begin with rows
    without actions for its placement and its microbatches.

    Raises UsageError for fields that are wrong, for a schedule that cannot be made, and for several schedules.
    """
    state = State.of(fields)
    if len(state.schedules) > 1:
        raise UsageError("choose one schedule to edit")
    made = state.schedule(state.schedules[0])
    recognised(made)  # takes a while for the first schedule of a size, so that the first edit does not
    begin = custom_fields(made) | {"rows_file": file_of(state.schedules[0]) or ""}
    return {"fields": begin, "empty": begin | {"rows": ""}}


def file(fields: Mapping[str, str]) -> dict[str, Any]:
    """The size of the file that a state shows, whether it is a measured timeline, and why it is unsound if it is.

    Raises UsageError for a file that cannot be shown, with the place that is wrong.
    """
    state = State.of(fields)
    if len(state.files) != 1:
        raise UsageError(f"the schedule must be {FILE}: and the name of the file")
    (found,) = state.files.values()
    return {
        "ranks": found.schedule.placement.num_ranks,
        "microbatches": found.schedule.num_microbatches,
        "measured": found.measured is not None,
        "problem": found.problem,
    }


def trace(fields: Mapping[str, str]) -> dict[str, Any]:
    """The step of median length as the text of a timeline, which the page then opens like any other.

    Raises UsageError for traces that show no whole step on all ranks.
    """
    steps, _ = recorded_steps([read_text_of(text, name) for name, text in texts_in(fields.get("files", "")).items()])
    step = median_step(steps)
    names = recognised(executed_schedule(step))
    return {"timeline": replace(step, name=names[0] if names else "own order").to_json()}


def tour(fields: Mapping[str, str]) -> dict[str, Any]:
    """The numbers of the steps that are reached. Raises UsageError as `plan` does."""
    state = State.of(fields)
    return {"reached": reached(state, tuple(state.timeline(name) for name in state.schedules))}


Answer = Callable[[Mapping[str, str]], dict[str, Any]]

ANSWERS: Mapping[str, Answer] = {
    "code": code,
    "compare": compare,
    "csv": csv,
    "file": file,
    "json": json,
    "model": model,
    "plan": plan,
    "search": search,
    "start": start,
    "svg": svg,
    "tour": tour,
    "trace": trace,
    "window": window,
}
"""The functions that answer, by the last part of the address that the page asks."""
