"""A recorded run: the files of all ranks, read and checked, as values that can be compared. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeflow.checking.files import Array, Event, misread, rank_files, read_events
from pipeflow.core.errors import UsageError

Blocks = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
KINDS: dict[str, dict[str, Any]] = {  # the fields that an event must have, and their types
    "before": {"name": str, "sketch": np.ndarray, "dtype": str},
    "after": {"name": str, "sketch": np.ndarray, "dtype": str},
    "gradient": {"name": str, "sketch": np.ndarray, "dtype": str},
    "unclipped": {"name": str, "sketch": np.ndarray, "dtype": str},
    "output": {
        "module": str,
        "call": int,
        "place": int,
        "dtype": str,
        "shape": list,
        "begin": list,
        "rows": np.ndarray,
    },
    "batch": {"place": int, "shape": list, "rows": np.ndarray},
    "labels": {"rows": np.ndarray, "valid": np.ndarray},
    "samples": {"name": str, "microbatch": int, "rows": np.ndarray, "mass": np.ndarray},
    "mass": {"name": str, "mass": np.ndarray},
    "loss": {"value": np.ndarray},
    "norm": {"most": (int, float), "value": np.ndarray},
    "rules": {"rules": dict},
    "stepped": {"random": str},
}
WIDTH = 9  # numbers of a sketch and the squared norm


class Info(NamedTuple):
    """A parameter or buffer of a rank, as its recording begins.

    Attributes:
        name: the tensor's name.
        shape: of the whole tensor.
        blocks: (offset, shape) of each block that the rank holds.
        dtype: of the weight, as torch calls it.
        stage: its pipeline stage, if the engine said so.
        same: equal for the names of one tied tensor.
        parameter: whether it is trained, rather than a buffer.
        chunk: index of the module that has it, of those that the rank recorded.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Blocks
    dtype: str
    stage: int | None
    same: int
    parameter: bool
    chunk: int


@dataclass
class Rank:
    """What one rank recorded: the events of each step, by kind."""

    rank: int
    start: Event
    steps: list[dict[str, list[Event]]]
    tensors: dict[str, Info] = field(default_factory=dict)


@dataclass
class Run:
    """A recording of all ranks."""

    folder: Path
    ranks: list[Rank]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def num_steps(self) -> int:
        return len(self.ranks[0].steps)

    def events(self, step: int, *kinds: str) -> Iterator[tuple[int, Event]]:
        """The events of a step with the ranks that recorded them, in order."""
        for each in self.ranks:
            if step < len(each.steps):
                for kind in kinds:
                    yield from ((each.rank, event) for event in each.steps[step].get(kind, ()))

    @cached_property
    def types(self) -> dict[str, dict[str, Any]]:
        """The modules by name: type, whether they have no children, and whether they drop values."""
        return {each["name"]: each for rank in self.ranks for each in rank.start["modules"]}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of groups of ranks by name."""
        return {name: size for rank in self.ranks for name, size in rank.start.get("groups", {}).items()}


def load(folder: Path) -> Run:
    """Reads a recording.

    Raises UsageError for files that are missing, damaged or cut off, and for ranks that recorded different steps.
    """
    ranks = [_rank(path, rank) for rank, path in rank_files(folder)]
    worlds = {each.start["world"] for each in ranks}
    world = max(worlds)
    if missing := sorted(set(range(world)) - {each.rank for each in ranks}):
        raise UsageError(
            f"{folder} lacks the files of ranks {', '.join(map(str, missing))} of {world}: copy them there"
        )
    if len(worlds) > 1 or len(ranks) != world:
        raise UsageError(f"{folder} has files of several recordings: record into an empty folder")
    if len({len(each.steps) for each in ranks}) > 1:
        counts = ", ".join(f"{len(each.steps)} on rank {each.rank}" for each in ranks)
        raise UsageError(f"the ranks of {folder} recorded different numbers of steps: {counts}; record the same on all")
    return Run(folder, ranks)


def _rank(path: Path, rank: int) -> Rank:
    first, *events = read_events(path)
    if first.get("rank") != rank or type(first.get("world")) is not int or not rank < first["world"] <= 10**6:
        misread(path, first, "is not that of this rank")
    tensors = {each.name: each for each in _infos(path, first)}
    modules = first.get("modules")
    if not isinstance(modules, list) or not all(map(_is_module, modules)):
        misread(path, first, "has no list of modules")
    groups = first.get("groups")
    if not isinstance(groups, dict) or not all(type(size) is int for size in groups.values()):
        misread(path, first, "has no sizes of groups")
    found = Rank(rank, first, [], tensors)
    step: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events[:-1]:
        _check(path, event, tensors)
        step[event["kind"]].append(event)
        if event["kind"] == "stepped":
            found.steps.append(dict(step))
            step = defaultdict(list)
    return found


def _is_module(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _infos(path: Path, first: Event) -> Iterator[Info]:
    try:
        for each in first["tensors"]:
            blocks = tuple((tuple(map(int, offset)), tuple(map(int, shape))) for offset, shape in each["offsets"])
            shape, stage = tuple(map(int, each["shape"])), each["stage"]
            if not isinstance(each["name"], str) or not (stage is None or type(stage) is int):
                raise TypeError("a name or a stage")
            same, chunk = int(each["same"]), int(each.get("chunk", 0))
            yield Info(each["name"], shape, blocks, str(each["dtype"]), stage, same, bool(each["parameter"]), chunk)
    except (KeyError, TypeError, ValueError) as error:
        misread(path, first, f"has a tensor that cannot be read ({error!r})")


def _check(path: Path, event: Event, tensors: Mapping[str, Info]) -> None:
    """Raises UsageError for an event that is not as `record` writes it."""
    kind = event["kind"]
    if kind not in KINDS:
        misread(path, event, "is of no known kind")
    for name, wanted in KINDS[kind].items():
        if not isinstance(event.get(name), wanted) or isinstance(event.get(name), bool):
            misread(path, event, f"has no {name!r}")
    for name in ("shape", "begin", "whole"):
        if name in event and not _is_sizes(event[name]):
            misread(path, event, f"has no sizes in {name!r}")
    if "sketch" in event and (event["sketch"].shape != (WIDTH,) or event["name"] not in tensors):
        misread(path, event, "is of no known tensor")
    if "values" in event and not _has_values(event, tensors):
        misread(path, event, "has other values than its tensor")
    if "rules" in event and not all(map(_is_rule, event["rules"].values())):
        misread(path, event, "has no rates and numbers of steps")
    if any(name in event and not event[name].size for name in ("value", "valid", "mass")):
        misread(path, event, "has no number")
    if kind in ("batch", "output", "samples") and not _has_rows(event):
        misread(path, event, "has other rows than its shape")


def _is_rule(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(each, int | float) for each in value)


def _has_values(event: Event, tensors: Mapping[str, Info]) -> bool:
    """Whether the values are those of the blocks that the rank has of a tensor, within the tensor; or of an output."""
    if event["kind"] == "output":
        return isinstance(event["values"], np.ndarray) and list(event["values"].shape) == event.get("shape")
    info = tensors.get(str(event.get("name")))
    return (
        info is not None
        and isinstance(event["values"], np.ndarray)
        and event["values"].shape == (sum(prod(shape) for _, shape in info.blocks),)
        and all(
            len(offset) == len(shape) == len(info.shape)
            and all(
                0 <= start <= start + size <= most for start, size, most in zip(offset, shape, info.shape, strict=True)
            )
            for offset, shape in info.blocks
        )
    )


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**40 for size in value)


def _has_rows(event: Event) -> bool:
    rows, shape = event["rows"], event.get("shape")
    if rows.ndim != 2 or rows.shape[1] != WIDTH - (event["kind"] == "samples"):
        return False
    places = [event[name] for name in ("begin", "whole") if name in event]
    if shape is None:
        return True
    many = shape[0] if shape else 1
    return len(rows) in (1, many) and all(len(place) in (len(shape) - 1, len(shape), 0) for place in places)


@dataclass(frozen=True)
class Copy:
    """What a rank recorded of a tensor: a sketch of its part, the part's squared norm, and its values if asked."""

    rank: int
    name: str
    blocks: Blocks
    sketch: Array
    square: float
    dtype: str
    values: Array | None = None


@dataclass(frozen=True)
class Whole:
    """A tensor of the whole model, from the parts of all ranks.

    Attributes:
        copies: what each rank recorded.
        sketch: of the whole; parts that several ranks hold count once, with their mean.
        square: its squared norm.
        spread: the largest distance of a copy from the mean of its kind.
        covered: whether the parts make up the whole.
        shape: of the whole.
    """

    copies: Sequence[Copy]
    sketch: Array
    square: float
    spread: float
    covered: bool
    shape: tuple[int, ...]

    @classmethod
    def of(cls, copies: Sequence[Copy], shape: Sequence[int]) -> Whole:
        kinds: defaultdict[Blocks, list[Copy]] = defaultdict(list)
        for copy in copies:
            kinds[copy.blocks].append(copy)
        means = {blocks: np.mean([each.sketch for each in mine], axis=0) for blocks, mine in kinds.items()}
        squares = [float(np.mean([each.square for each in mine])) for mine in kinds.values()]
        spread = max(norm(each.sketch - means[each.blocks]) for each in copies)
        volume = sum(prod(size) for blocks in kinds for _, size in blocks)
        return cls(
            copies, np.sum(list(means.values()), axis=0), sum(squares), spread, volume == prod(shape), tuple(shape)
        )

    @property
    def norm(self) -> float:
        return float(np.sqrt(self.square))

    @property
    def values(self) -> Array | None:
        """The values, if all ranks recorded them; of parts that several ranks hold, those of the last."""
        if not self.covered or any(copy.values is None for copy in self.copies):
            return None
        found = np.zeros(self.shape)
        for copy in self.copies:
            start = 0
            assert copy.values is not None
            for offset, shape in copy.blocks:
                where = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
                found[where] = copy.values[start : start + prod(shape)].reshape(shape)
                start += prod(shape)
        return found

    @property
    def kinds(self) -> int:
        """How many different parts there are."""
        return len({copy.blocks for copy in self.copies})


def norm(sketch: Array) -> float:
    """The estimated norm of what a sketch, or each row of sketches, stands for."""
    return float(np.sqrt(np.mean(np.square(sketch))))
