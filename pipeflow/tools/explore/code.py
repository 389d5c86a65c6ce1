"""Code: what makes a timeline of the page again, as Python and as a command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields as fields_of
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.cost_fields import EVEN_COSTS, EVEN_NAMES, NAMED, Link, without_use
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.registry import is_searched
from pipeflow.tools.explore.fields import CUSTOM, FIELDS, file_of, option_text, split
from pipeflow.tools.explore.state import State


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
