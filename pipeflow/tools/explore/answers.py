"""Answers: what the page can ask for, each a function from the fields of a request to JSON values, and the table of
them. Must not contain: the answers that are views of a state.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.analysis.measured_step import executed_schedule
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import EVEN_COSTS, EVEN_NAMES, NAMED, CostModel, Link, without_use
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.text import percent
from pipeflow.draw.svg_timeline import svg as drawn
from pipeflow.schedules.order_search import search as searched
from pipeflow.schedules.orders.additions import without_optimizer_step
from pipeflow.schedules.registry import is_searched, recognised
from pipeflow.tools.explore.fields import CUSTOM, FIELDS, FILE, file_of, option_text, split
from pipeflow.tools.explore.own_schedule import saving
from pipeflow.tools.explore.state import State, custom_fields, texts_in
from pipeflow.tools.explore.tour import reached
from pipeflow.tools.explore.views import compare, model, plan, window
from pipeflow.tools.traces.explanation import recorded_steps
from pipeflow.tools.traces.files import read_text_of
from pipeflow.tools.traces.readings import median_step

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
    state, name = _one(fields, "choose one schedule to search from")
    made = state.schedule(name)
    placement, cost = made.placement, state.prices.cost_model(made.placement)
    if len(placement.paths) > 1:
        raise UsageError("a search takes placements in one direction: begin with a schedule like 1f1b or zb-v")
    if placement.num_stages * made.num_microbatches * made.slices > LARGEST_SEARCHED:
        few = "use fewer microbatches" + " or slices" * (made.slices > 1)
        raise UsageError(f"a search takes up to {LARGEST_SEARCHED:,} stages times microbatches: {few}")
    wrong = _wrong(state, made)
    found = searched(
        placement,
        made.num_microbatches,
        cost,
        memory_cap=state.options.get("memory_cap"),
        bytes_cap=state.options.get("bytes_cap"),
        kinds=saving(made),
        budget=BUDGET,
        start=[] if wrong else [without_optimizer_step(made.without_reductions())],
        name=CUSTOM,
        slices=made.slices,
    )
    best = state.request(name).completed(found.schedule)
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
    return "keeps more than the memory cap" if verify(made, memory_cap=state.options.get("memory_cap")) else ""


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


def python(state: State, name: str) -> str:
    """Python that makes the schedule `name` of a state, its costs and its timeline. Raises UsageError for a schedule
    that cannot be made, or cannot be written as a table.
    """
    if (file := state.files.get(file_of(name) or "")) is not None and file.measured is not None:
        raise UsageError("there is no code for a measured timeline: save its times")
    made = state.schedule(name)
    planned = is_searched(split(name)[0]) or "offload_stages" in state.options_for(name)  # its costs come first
    if planned or _by_stage(state) or any(EVEN_COSTS[cost].of not in (None, *NAMED) for _, cost in _given(state)):
        cost = _call("pipeflow.CostModel", [*_per_stage(state.prices.cost_model(made.placement))])
    else:
        cost = _call("pipeflow.CostModel.even", ["schedule.placement", *_even(state)])
    is_table = name == CUSTOM or file is not None or state.prices.gathers
    maker = _table(made) if is_table else _named(state, name, planned=planned)
    lines = [f"schedule = {maker}", f"cost = {cost}"]
    last = "timeline = pipeflow.simulate(schedule, cost)\n"
    return "\n".join(["import pipeflow\n", *(reversed(lines) if planned else lines), last])


def _named(state: State, name: str, *, planned: bool) -> str:
    given = {option.removesuffix("_stages"): value for option, value in state.options_for(name).items()}
    options = {"ranks": state.ranks, "microbatches": state.microbatches, **given}
    words = [
        repr(split(name)[0]),
        *(f"{option}={value!r}" for option, value in options.items()),
        *["cost=cost"] * planned,
    ]
    made = _call("pipeflow.make_schedule", words) + ".with_reductions()" * state.prices.reduces
    return _call("pipeflow.with_optimizer_step", [made]) if state.prices.steps else made


def _table(made: Schedule) -> str:
    """A schedule by its table, with what that does not show."""
    rest: list[Any] = [made.placement, made.num_microbatches]
    text = f'"""\\\n{made.to_csv()}"""'
    for given in ([], rest[:1], rest):
        with suppress(UsageError):
            if Schedule.from_csv(made.to_csv(), *given, name=made.name) == made:
                return f"pipeflow.Schedule.from_csv({', '.join([text, *map(_written, given), f'name={made.name!r}'])})"
    raise UsageError("there is no code for this schedule yet: each rank needs an action")


def command(state: State, name: str) -> str | None:
    """The `pipeflow draw` command that draws the schedule `name` of a state; None if no options say what it is."""
    if name == CUSTOM or file_of(name) is not None or _by_stage(state):
        return None
    options: dict[str, object] = {"ranks": state.ranks, "microbatches": state.microbatches, **state.options_for(name)}
    given = {argument: state.prices.costs[field] for field, argument in _given(state)}
    unread = {argument for argument, _ in without_use(given, [state.schedule(name)])}  # which the command refuses
    options |= {argument: value for argument, value in given.items() if argument not in unread}
    words = ["pipeflow", "draw", split(name)[0]]
    for option, value in options.items():
        words += [f"--{option.replace('_', '-')}", option_text(value)]
    return shlex.join(words)


def _by_stage(state: State) -> bool:
    """Whether the costs differ from stage to stage, or are of transfers in bytes."""
    prices = state.prices
    in_bytes = prices.costs["activation_bytes"] and prices.costs.get("bandwidth")
    return bool(prices.factors or prices.modelled is not None or prices.measured is not None or in_bytes)


def _given(state: State) -> Iterator[tuple[str, str]]:
    """The costs that differ from their defaults: their fields, and their names in `EVEN_COSTS`."""
    for field, argument in EVEN_NAMES.items():
        if state.prices.costs[field] != float(FIELDS[field].default):
            yield field, argument


def _even(state: State) -> Iterator[str]:
    for field, argument in _given(state):
        yield f"{argument}={state.prices.costs[field]!r}"


def _per_stage(cost: CostModel) -> Iterator[str]:
    """The arguments that make a cost model."""
    for number, field in enumerate(each for each in fields_of(cost) if each.init):
        value = getattr(cost, field.name)
        if number < 3 or (value and value != field.default):
            yield f"{field.name}={_written(value)}"


def _written(value: object) -> str:
    """A value of a cost model, or a placement, as Python."""
    match value:
        case Placement(paths):
            return f"pipeflow.Placement({paths})"
        case Link():
            return f"pipeflow.Link({_written(value.latency)}, {_written(value.bandwidth)})"
        case tuple() if len(value) > 2 and len(set(value)) == 1:
            return f"({_written(value[0])},) * {len(value)}"
        case tuple():
            return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
        case Mapping():
            return f"{{{', '.join(f'{_written(key)}: {_written(each)}' for key, each in value.items())}}}"
        case Kind() | Content():
            return repr(str(value))
        case float() if math.isinf(value):
            return 'float("inf")'
    return repr(value)


def _call(function: str, arguments: list[str]) -> str:
    """A call, in several lines if it is long."""
    line = f"{function}({', '.join(arguments)})"
    return line if len(line) <= 100 else "".join([f"{function}(\n", *(f"    {each},\n" for each in arguments), ")"])


def _one(fields: Mapping[str, str], what: str = "one schedule can be exported at a time") -> tuple[State, str]:
    """The state and its schedule. Raises UsageError that says `what` for several."""
    state = State.of(fields)
    if len(state.schedules) > 1:
        raise UsageError(f"{what}, got {', '.join(state.schedules)}")
    return state, state.schedules[0]


def start(fields: Mapping[str, str]) -> dict[str, Any]:
    """`fields`: what to set in the link to begin with the schedule of a state; `empty`: the same to begin with rows
    without actions for its placement and its microbatches.

    Raises UsageError for fields that are wrong, for a schedule that cannot be made, and for several schedules.
    """
    state, name = _one(fields, "choose one schedule to edit")
    made = state.schedule(name)
    recognised(made)  # takes a while for the first schedule of a size, so that the first edit does not
    begin = custom_fields(made) | {"rows_file": file_of(name) or ""}
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
    files = [read_text_of(text, name) for name, text in texts_in(fields.get("files", "")).items()]
    step = median_step(recorded_steps(files).steps)
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
