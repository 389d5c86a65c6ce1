"""State: what the page shows, read from the fields of a link. Must not contain: schedules and timelines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import ScheduleError, UsageError, unknown
from pipeflow.core.placement import Placement
from pipeflow.draw.times import Unit
from pipeflow.explore.fields import CUSTOM, FIELDS, Field
from pipeflow.explore.limits import require_length, require_size, require_table
from pipeflow.explore.modelled import Modelled
from pipeflow.schedules import SCHEDULES, options_of

EVEN = {  # fields that are arguments of CostModel.even, and what it calls them
    **{name: name for name in ("forward", "backward_input", "backward_weight")},
    "latency": "transfer",
    **{name: name for name in ("overlap", "reduce", "saved_bytes", "deferred_bytes")},
}
MOST_SHOWN = 8  # schedules side by side


@final
@dataclass(frozen=True, slots=True)
class State:
    """What the page shows.

    Attributes:
        schedules: the names of the schedules, `CUSTOM` for the one that the reader builds.
        ranks, microbatches: the size of named schedules.
        options: given options of schedules.
        costs: the given costs, by the names of their fields.
        factors: relative times of equal parts of the model.
        modelled: the model that prices the schedules, instead of the costs.
        rows, placement: the reader's own schedule as a table, and its placement if that is given.
        rows_microbatches: the number of microbatches that this schedule has at least.
        selected: the selected range of time, in the timelines' unit.
    """

    schedules: tuple[str, ...]
    ranks: int
    microbatches: int
    options: Mapping[str, Any]
    costs: Mapping[str, float]
    factors: tuple[float, ...] = ()
    modelled: Modelled | None = None
    rows: str = ""
    placement: Placement | None = None
    rows_microbatches: int = 1
    selected: tuple[float, float] = (0.0, math.inf)

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> State:
        """The state that the fields of a link describe. Raises UsageError with the name of a field that is wrong."""
        for name in fields:
            if name not in FIELDS:
                raise unknown("field", name[:40], FIELDS)
        for name, text in fields.items():
            require_length(name, text)
        values = {name: _value(FIELDS[name], text) for name, text in fields.items() if text}
        values = {name: _value(each, each.default) for name, each in FIELDS.items() if each.default} | values
        options = {each.name for each in FIELDS.values() if each.group == "Schedule"}
        options -= {"schedule", "ranks", "microbatches"}
        state = cls(
            _names(values["schedule"]),
            values["ranks"],
            values["microbatches"],
            {name: values[name] for name in FIELDS if name in options and name in values},
            {
                each.name: values[each.name]
                for each in FIELDS.values()
                if each.group == "Costs" and each.kind == "number"
            },
            values.get("factors", ()),
            Modelled.of(values),
            values.get("rows", ""),
            _placement(values["placement"]) if "placement" in values else None,
            values.get("rows_microbatches", 1),
        )
        require_size(
            [name for name in state.schedules if name != CUSTOM], state.ranks, state.microbatches, state.options
        )
        require_table(state.rows)
        factor = state.unit.factor
        return replace(state, selected=(values.get("from", 0.0) / factor, values.get("to", math.inf) / factor))

    @property
    def memory_cap(self) -> float | tuple[float, ...] | None:
        """The most activations that a rank may keep, if that is given."""
        return self.options.get("memory_cap")

    @property
    def bytes_cap(self) -> float | tuple[float, ...] | None:
        """The most bytes that a rank may keep, if that is given."""
        return self.options.get("bytes_cap")

    def options_for(self, schedule: str) -> dict[str, Any]:
        """The options that the schedule with this name has."""
        return {name: value for name, value in self.options.items() if name in options_of(schedule)}

    def only(self, schedule: str) -> State:
        """The same state with one schedule."""
        return replace(self, schedules=(schedule,))

    def cost_model(self, placement: Placement) -> CostModel:
        """The costs for the stages of `placement`. Raises UsageError for a model that does not fit them."""
        model = self._by_hand(placement) if self.modelled is None else self.modelled.cost_model(placement)
        if not self.factors:
            return model
        factors = [_mean(self.factors, stage, placement.num_stages) for stage in range(placement.num_stages)]
        timed: dict[str, Any] = {
            name: tuple(factor * time for factor, time in zip(factors, getattr(model, name), strict=True))
            for name in ("forward", "backward_input", "backward_weight")
        }
        return replace(model, **timed)

    def _by_hand(self, placement: Placement) -> CostModel:
        costs = self.costs
        model = CostModel.even(placement, **{argument: costs[name] for name, argument in EVEN.items()})
        if not (costs["activation_bytes"] and costs["bandwidth"]):
            return model
        size = (costs["activation_bytes"],) * placement.num_stages
        return replace(model, activation_bytes=size, bandwidth=costs["bandwidth"])

    @property
    def reduces(self) -> bool:
        """Whether schedules reduce their weight gradients over replicas."""
        return bool(self.costs["reduce"]) if self.modelled is None else self.modelled.setup.data > 1

    @property
    def unit(self) -> Unit:
        """The unit of times: those of a model are in seconds and shown in milliseconds, others have none."""
        return Unit() if self.modelled is None else Unit("ms", 1000.0)


def _mean(factors: tuple[float, ...], stage: int, stages: int) -> float:
    """The mean of the factors over the part of the model that a stage is."""
    first, last = stage * len(factors) / stages, (stage + 1) * len(factors) / stages
    parts = [
        (min(last, index + 1) - max(first, index)) * factors[index]
        for index in range(math.floor(first), min(math.ceil(last), len(factors)))
    ]
    return sum(parts) / (last - first)


def _value(field: Field, text: str) -> Any:
    """The value of a field from its text."""
    match field.kind:
        case "whole":
            return _whole(field, text)
        case "number":
            return _number(field, text)
        case "numbers" if "," in text or field.name == "factors":
            return tuple(_number(field, part) for part in text.split(","))
        case "numbers":
            return _number(field, text)
        case "flag" if text != "1":
            raise UsageError(f"{field.name} is 1 or left out, got {text[:40]!r}")
        case "choice" if text not in field.choices:
            raise UsageError(f"{field.name} must be one of {', '.join(field.choices)}, got {text[:40]!r}")
    return text


def _whole(field: Field, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= field.least):
        raise UsageError(f"{field.name} must be a whole number of at least {field.least:g}, got {text[:40]!r}")
    return int(text)


def _number(field: Field, text: str) -> float:
    """A number; an int if it is whole."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"{field.name} must be a number that is finite and not negative, got {text[:40]!r}")
    return int(number) if number.is_integer() else number


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name != CUSTOM and name not in SCHEDULES:
            raise unknown("schedule", name[:40], SCHEDULES)
    if len(names) > MOST_SHOWN:
        raise UsageError(f"at most {MOST_SHOWN} schedules can be shown side by side, got {len(names)}")
    return names


def _placement(text: str) -> Placement:
    """Reads what `placement_text` writes."""
    try:
        return Placement(tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split("_")))
    except ScheduleError:
        raise
    except ValueError:
        raise UsageError(f"placement must be like 0.1.2.3, the rank of each stage, got {text[:40]!r}") from None
