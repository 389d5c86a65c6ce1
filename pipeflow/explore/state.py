"""State: what the page shows, read from the fields of a link. Must not contain: schedules and timelines that are made
from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, final

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import ScheduleError, UsageError, unknown
from pipeflow.core.even_costs import even_model
from pipeflow.core.placement import Placement
from pipeflow.draw.times import Unit
from pipeflow.explore.depth import mean
from pipeflow.explore.fields import CUSTOM, EVEN, FIELDS, Field, option_text
from pipeflow.explore.limits import require_length, require_size, require_table
from pipeflow.explore.model_costs import Modelled
from pipeflow.explore.names import FILE, file_of, is_file, joined, split
from pipeflow.explore.reader_file import Opened, opened
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.memory import STAGE_OPTIONS, stages_in

MOST_SHOWN = 8  # schedules side by side


@final
@dataclass(frozen=True, slots=True)
class State:
    """The settings of the page, as its link holds them.

    Attributes:
        schedules: the names of the schedules, as `names` describes them.
        ranks, microbatches: the size of named schedules.
        options: given options of schedules.
        costs: the given costs, by the names of their fields.
        factors: relative times of equal parts of the model.
        modelled: the model that prices the schedules, instead of the costs.
        own: per name that has options of its own, these.
        files: per name of a file, what is in it.
        measured: the file whose measured costs price the schedules, since no others are given.
        rows, placement: the reader's own schedule as a table, and its placement if that is given.
        rows_microbatches: the number of microbatches that this schedule has at least.
        rows_file: the name of the file that this schedule comes from; empty: none.
        selected: the selected range of time, in the timelines' unit.
    """

    schedules: tuple[str, ...]
    ranks: int
    microbatches: int
    options: Mapping[str, Any]
    costs: Mapping[str, float]
    factors: tuple[float, ...] = ()
    modelled: Modelled | None = None
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, Opened] = field(default_factory=dict)
    measured: Opened | None = None
    rows: str = ""
    placement: Placement | None = None
    rows_microbatches: int = 1
    rows_file: str = ""
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
        names = _names(values["schedule"])
        files = _files(names, values.get("files", ""))
        costs_given = any(
            fields.get(each.name) for each in FIELDS.values() if each.group == "Costs" or each.name == "model"
        )
        measured = [file for file in files.values() if file.measured is not None and not costs_given]
        state = cls(
            tuple(names),
            values["ranks"],
            values["microbatches"],
            {name: values[name] for name in FIELDS if name in options and name in values},
            {
                each.name: values[each.name]
                for each in FIELDS.values()
                if each.group == "Costs" and each.kind == "number" and each.name in values
            },
            values.get("factors", ()),
            Modelled.of(values),
            {name: own for name, own in names.items() if own is not None},
            files,
            measured[0] if measured else None,
            values.get("rows", ""),
            _placement(values["placement"]) if "placement" in values else None,
            values.get("rows_microbatches", 1),
            _file_name(values.get("rows_file", "")),
        )
        require_size(state.families(state.schedules), state.ranks, state.microbatches)
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

    def only(self, schedule: str) -> State:
        """The same state with one schedule."""
        return replace(self, schedules=(schedule,))

    def options_for(self, name: str) -> dict[str, Any]:
        """The given options that the schedule `name` has: its own, or those of the link. Files have only stages."""
        known = _known_options(split(name)[0])
        return {option: value for option, value in self.own.get(name, self.options).items() if option in known}

    def families(self, names: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
        """Those of the names that are of the registry, each with the options that it has."""
        return [(split(name)[0], self.options_for(name)) for name in names if split(name)[0] in SCHEDULES]

    def with_own_options(self, name: str) -> str:
        """The name with the options that it has now as its own. Files and the reader's own schedule have none."""
        if split(name)[0] not in SCHEDULES or name in self.own:
            return name
        return joined(name, {option: option_text(value) for option, value in self.options_for(name).items()})

    def cost_model(self, placement: Placement) -> CostModel:
        """The costs for the stages of `placement`. Raises UsageError for a model that does not fit them."""
        if self.measured is not None:
            return self.measured.costs(placement.num_stages)
        model = self._by_hand(placement) if self.modelled is None else self.modelled.cost_model(placement)
        if not self.factors:
            return model
        factors = [mean(self.factors, stage, placement.num_stages) for stage in range(placement.num_stages)]
        timed: dict[str, Any] = {
            name: tuple(factor * time for factor, time in zip(factors, getattr(model, name), strict=True))
            for name in ("forward", "backward_input", "backward_weight")
        }
        return replace(model, **timed)

    def _by_hand(self, placement: Placement) -> CostModel:
        costs = self.costs
        model = even_model(placement, {cost: costs[name] for name, cost in EVEN.items()})
        if "bandwidth" not in costs:
            return model
        size = (costs["activation_bytes"],) * placement.num_stages
        return replace(model, activation_bytes=size, bandwidth=costs["bandwidth"])

    @property
    def reduces(self) -> bool:
        """Whether schedules reduce their weight gradients over replicas."""
        if self.modelled is not None:
            return self.modelled.setup.data > 1
        return bool(self.costs["reduce"]) or (self.measured is not None and self.measured.reduces)

    @property
    def gathers(self) -> bool:
        """Whether schedules gather the weights of their stages, which replicas share out."""
        return self.modelled is not None and self.modelled.setup.zero == 3 and self.modelled.setup.data > 1

    @property
    def steps(self) -> bool:
        """Whether schedules have the optimizer's steps."""
        return self.modelled is None and bool(self.costs["optimizer"])

    @property
    def unit(self) -> Unit:
        """The unit of times: a readable one for those of a model or of a measured step, which are in seconds. Others
        have none. It follows from the busiest stage, so that links can say times before anything is simulated.
        """
        if self.modelled is not None:
            return Unit.readable(self.microbatches * _longest(self.modelled, self.ranks))
        measured = None if self.measured is None else self.measured.measured
        return Unit() if measured is None else Unit.of([measured])


@lru_cache(64)
def _longest(modelled: Modelled, ranks: int) -> float:
    """The seconds of the busiest of as many stages as ranks, for one microbatch."""
    cost = modelled.cost_model(Placement.linear(ranks))
    return max(map(sum, zip(cost.forward, cost.backward_input, cost.backward_weight, strict=True)))


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
        case "stages":
            return _stages(field, text)
        case "flag" if text != "1":
            raise UsageError(f"{field.name} is 1 or left out, got {text[:40]!r}")
        case "choice" if text not in field.choices:
            raise UsageError(f"{field.name} must be one of {', '.join(field.choices)}, got {text[:40]!r}")
    return text


def _stages(field: Field, text: str) -> bool | tuple[int, ...]:
    try:
        return stages_in(text)
    except UsageError as error:
        raise UsageError(f"{field.name}: {error}") from None


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


def _names(text: str) -> dict[str, dict[str, Any] | None]:
    """The names, each with its own options, or None."""
    names = {name: _own_options(name) for name in text.split(",")}
    if len(names) > MOST_SHOWN:
        raise UsageError(f"at most {MOST_SHOWN} schedules can be shown side by side, got {len(names)}")
    return names


def _own_options(text: str) -> dict[str, Any] | None:
    name, options = split(text)
    if text == CUSTOM or file_of(text) is not None:
        return None
    if name == FILE:
        _file_name(text)
    if name not in SCHEDULES:
        raise unknown("schedule", name[:40], SCHEDULES)
    for option in options or ():
        if option not in _known_options(name) or option not in FIELDS:
            raise UsageError(f"schedule {name!r} does not take {option[:40]!r}")
    return options and {option: _value(FIELDS[option], value) for option, value in options.items()}


def _known_options(name: str) -> tuple[str, ...]:
    """The options that a schedule of the registry has, or a file."""
    return (*(options_of(name) if name in SCHEDULES else ()), *STAGE_OPTIONS)


def _file_name(text: str) -> str:
    if text and not is_file(text):
        raise UsageError(f"{text[:80]!r} is not the name of a file: letters, digits, dots, underscores and hyphens")
    return text


def texts_in(text: str) -> dict[str, str]:
    """The texts of files, by their names, from a JSON object. Raises UsageError for anything else."""
    try:
        texts = json.loads(text or "{}")
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
        raise UsageError("files must be a JSON object with the text of each file")
    return texts


def _files(names: Iterable[str], text: str) -> dict[str, Opened]:
    """The files among the names. `text` is a JSON object with their texts."""
    texts = texts_in(text)
    files = [name for name in map(file_of, names) if name is not None]
    for name in files:
        if name not in texts:
            raise UsageError(f"{name} is not in this tab: open the file again, or remove it")
    return {name: opened(name, texts[name]) for name in files}


def _placement(text: str) -> Placement:
    """Reads what `placement_text` writes."""
    try:
        return Placement(tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split("_")))
    except ScheduleError:
        raise
    except ValueError:
        raise UsageError(f"placement must be like 0.1.2.3, the rank of each stage, got {text[:40]!r}") from None
