"""Costs: the cost model from a command's arguments: even costs from options, or per-stage costs from a file."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields
from typing import Any, final

from pipeflow.cli.options import flag
from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel, Link
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.even_costs import EVEN_COSTS, even_model
from pipeflow.core.files import read_text
from pipeflow.core.json_values import parse
from pipeflow.core.placement import Placement

NUMBERS = ("latency", "bandwidth", "overlap")
TABLES: dict[str, type[Kind | Content]] = {"times": Kind, "kept_bytes": Content}


@final
@dataclass(frozen=True, slots=True)
class Costs:
    """The given costs.

    Attributes:
        even: even costs, by their names in `EVEN_COSTS`.
        file: path of a JSON file with per-stage costs.
        measured: measured costs, used if none are given.
    """

    even: dict[str, float]
    file: str | None = None
    measured: CostModel | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Costs:
        """The costs that the arguments give. Raises UsageError for even costs together with a file."""
        even = {name: getattr(arguments, name) for name in EVEN_COSTS if getattr(arguments, name) is not None}
        if even and arguments.costs is not None:
            raise UsageError(f"{flag(min(even))} and --costs are two ways to give costs: choose one")
        return cls(even, arguments.costs)

    @property
    def given(self) -> str | None:
        """An option that gave a cost; None if there is none."""
        return "--costs" if self.file is not None else next(map(flag, self.even), None)

    @property
    def reduce(self) -> bool:
        """Whether the costs include reductions, so that schedules need them. Raises UsageError for a wrong file."""
        return "reduce" in self.even if self.file is None else bool(self._read(self.file).reduce)

    @property
    def optimizer(self) -> bool:
        """Whether the costs include steps of the optimizer. Raises UsageError for a wrong file."""
        return "optimizer" in self.even if self.file is None else bool(self._read(self.file).optimizer)

    def model(self, placement: Placement) -> CostModel:
        """The cost model for `placement`. Raises UsageError for measured costs, or a file, that do not fit it."""
        if self.measured is not None:
            if (stages := len(self.measured.forward)) != placement.num_stages:
                fits = f"costs measured on {stages} stages do not fit {placement.num_stages}"
                raise UsageError(f"{fits}: give costs, as in --forward 1")
            return self.measured
        if self.file is None:
            return even_model(placement, self.even)
        model = self._read(self.file)
        if len(model.forward) != placement.num_stages:
            message = f"costs are per stage: the file has {len(model.forward)}, not {placement.num_stages}"
            raise UsageError(f"{self.file}: {message}")
        return model

    @staticmethod
    def _read(path: str) -> CostModel:
        text = read_text(path)
        try:
            return cost_model(text)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None


def cost_model(text: str) -> CostModel:
    """Reads JSON whose keys are fields of `CostModel`. Raises UsageError with the field that is wrong."""
    given = parse(text)
    known = [field.name for field in fields(CostModel) if field.init]
    if not isinstance(given, dict):
        raise UsageError(f"costs must be an object with some of {', '.join(known)}")
    if unknown := [name for name in given if name not in known]:
        raise UsageError(f"{unknown[0]!r} is not a cost; known: {', '.join(known)}")
    if missing := [name for name in known[:3] if name not in given]:
        raise UsageError(f"{missing[0]} is missing: give a list with one number per stage")
    return CostModel(**{name: _field(name, value) for name, value in given.items()})


def _field(name: str, value: object) -> Any:
    if name == "links":
        return _links(value)
    if name == "unit":
        return value  # CostModel checks it
    if name == "route_bytes":
        return _routes(value)
    if name == "copy_groups":
        return _groups(value)
    if name == "microbatch_factors":
        return _numbers(name, value, "microbatch")
    if name in NUMBERS:
        return _number(value, name)
    return _table(name, TABLES[name], value) if name in TABLES else _numbers(name, value)


def _numbers(name: str, value: object, of: str = "stage") -> tuple[float, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{name} must be a list with one number per {of}, got {value!r}")
    return tuple(_number(number, f"{name} of {of} {index}") for index, number in enumerate(value))


def _table(name: str, keys: type[Kind | Content], value: object) -> dict[Kind | Content, tuple[float, ...]]:
    if not isinstance(value, dict) or set(value) - set(keys):
        some = ", ".join(keys)
        raise UsageError(f"{name} must be an object with a list per stage for some of {some}, got {value!r}")
    return {keys(key): _numbers(f"{name} of {key}", numbers) for key, numbers in value.items()}


def _links(value: object) -> dict[tuple[int, int], Link]:
    if not isinstance(value, dict):
        raise UsageError(f'links must be like {{"0->1": {{"latency": 0.1}}}}, got {value!r}')
    links = {}
    for key, given in value.items():
        ends = _ENDS.fullmatch(key)
        if ends is None or not isinstance(given, dict) or set(given) - set(Link._fields):
            raise UsageError(f'links: {key!r} must be like "0->1": {{"latency": 0.1, "bandwidth": 50}}')
        numbers = {name: _number(number, f"{name} of link {key}") for name, number in given.items()}
        link = Link(**numbers)
        if link.latency < 0 or not link.bandwidth > 0:
            raise UsageError(f"link {key}: latency must not be negative and bandwidth must be positive, got {given}")
        links[int(ends[1]), int(ends[2])] = link
    return links


def _routes(value: object) -> dict[tuple[int, int], float]:
    if not isinstance(value, dict) or not all(map(_ENDS.fullmatch, value)):
        raise UsageError(f'route_bytes must be like {{"0->2": 100}}, from stage to stage, got {value!r}')
    found = {key: _number(number, f"route_bytes of {key}") for key, number in value.items()}
    return {(int(ends[1]), int(ends[2])): found[key] for key in value if (ends := _ENDS.fullmatch(key))}


def _groups(value: object) -> tuple[tuple[int, ...], ...]:
    """Ranks, per link to a host."""
    groups = value if isinstance(value, list) and all(isinstance(group, list) for group in value) else [[None]]
    if not all(type(rank) is int for group in groups for rank in group):
        raise UsageError(
            f"copy_groups must be a list of the ranks on each link, such as [[0, 1], [2, 3]], got {value!r}"
        )
    return tuple(map(tuple, groups))


_ENDS = re.compile(r"\s*(\d{1,9})\s*->\s*(\d{1,9})\s*", re.ASCII)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what} must be a number, got {value!r}")
    return float(value)
