"""Runs: what the ranks of one run recorded, put together from their parts: tensors of the whole model, and the outputs
of a module over all microbatches, replicas and tensor ranks. Which rank had which sample does not matter: a row of one
run is looked for among all rows of the other. Must not contain: what differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeflow.checking.files import Array, Blocks, Event, Info, rank_files, read_rank
from pipeflow.checking.limits import SAME_VALUES, TINY, Rounding, tolerance, unit
from pipeflow.core.errors import UsageError

_CHUNK = 64  # rows compared with all others at once
_PAIRS, _MOST = 2**22, 2**26  # pairs of rows: up to so many all are compared; of more, those that may be alike

Key = tuple[str, int]  # a module and which of its outputs
Called = tuple[int, Event]  # a rank, and the event of an output


def norm(sketch: Array) -> float:
    """The estimated norm of what a sketch, or each row of sketches, stands for."""
    return float(np.sqrt(np.mean(np.square(sketch))))


def owner(name: str) -> str:
    """The module that has a parameter, or another module."""
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class PartRecord:
    """What a rank recorded of a tensor: a sketch of its part, the part's squared norm, and its values if asked."""

    rank: int
    name: str
    blocks: Blocks
    sketch: Array
    square: float
    dtype: str
    values: Array | None = None


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the whole model, from the parts of all ranks.

    Attributes:
        copies: what each rank recorded.
        sketch: of the whole; parts that several ranks hold count once, with their mean.
        square: its squared norm.
        spread: the largest distance of a copy from the mean of its kind.
        covered: whether the parts make up the whole.
        shape: of the whole.
    """

    copies: Sequence[PartRecord]
    sketch: Array
    square: float
    spread: float
    covered: bool
    shape: tuple[int, ...]

    @classmethod
    def of(cls, copies: Sequence[PartRecord], shape: Sequence[int]) -> WholeTensor:
        kinds: defaultdict[Blocks, list[PartRecord]] = defaultdict(list)
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

    def apart(self, other: WholeTensor) -> float:
        """How far another run's tensor, or one of its copies from the others, is from this one."""
        return max(norm(self.sketch - other.sketch), other.spread)

    @property
    def unit(self) -> float:
        """The largest unit roundoff of a copy's dtype."""
        return max(unit(copy.dtype) for copy in self.copies)

    def is_as_large(self, other: WholeTensor) -> bool:
        """Whether the norms are those of the same values, which may lie at other places."""
        return abs(self.square / max(other.square, TINY) - 1.0) < SAME_VALUES

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
    def ranks(self) -> list[int]:
        """The ranks that hold copies."""
        return [copy.rank for copy in self.copies]

    @property
    def kinds(self) -> int:
        """How many different parts there are."""
        return len({copy.blocks for copy in self.copies})


@dataclass
class Rank:
    """What one rank recorded.

    Attributes:
        rank: the rank.
        start: the first event.
        tensors: its parameters and buffers by its own names.
        steps: the events of each step, by kind.
        names: the names by which all ranks know its tensors; those that only it has are left out.
        prefixes: how it calls some modules, and how all ranks do.
    """

    rank: int
    start: Event
    tensors: dict[str, Info]
    steps: list[dict[str, list[Event]]]
    names: dict[str, str] = field(default_factory=dict)
    prefixes: dict[str, str] = field(default_factory=dict)

    def module(self, name: str) -> str:
        """The name by which all ranks know a module."""
        for own, theirs in self.prefixes.items():
            if name == own or name.startswith(f"{own}."):
                return theirs + name[len(own) :]
            if not own:
                return f"{theirs}.{name}" if name else theirs
        return name


@dataclass
class RecordedRun:
    """A recording of all ranks.

    Attributes:
        folder: where it is.
        ranks: what each rank recorded, in order.
        modules: names of the modules whose outputs count; None: all.
    """

    folder: Path
    ranks: list[Rank]
    modules: Collection[str] | None = None

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

    @cached_property
    def first(self) -> dict[str, str]:
        """For each name, the first name of the same tensor; ranks that share one of the names share all."""
        first: dict[str, str] = {}
        for rank in self.ranks:
            mine: dict[int, str] = {}
            for info in rank.tensors.values():
                known = first.get(info.name, info.name)
                first.setdefault(info.name, mine.setdefault(info.same, known))
        return first

    @cached_property
    def ties(self) -> dict[str, list[str]]:
        """The names of each tensor that has several, by the first of them."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for name, first in self.first.items():
            groups[first].append(name)
        return {first: names for first, names in groups.items() if len(names) > 1}

    @cached_property
    def parameters(self) -> set[str]:
        """The names of the tensors that are trained."""
        return {info.name for rank in self.ranks for info in rank.tensors.values() if info.parameter}

    def tensors(self, step: int, kind: str, key: str = "") -> dict[str, WholeTensor]:
        """The tensors of the whole model that events of this kind, and with this key, tell of, by name."""
        copies: defaultdict[str, list[PartRecord]] = defaultdict(list)
        shapes: dict[str, tuple[int, ...]] = {}
        for rank in self.ranks:
            done: set[tuple[str, int]] = set()
            for event in rank.steps[step].get(kind, ()) if step < len(rank.steps) else ():
                info, name = rank.tensors[event["name"]], rank.names.get(event["name"])
                if name is None or (name, info.same) in done or event.get("key", "") != key:
                    continue
                done.add((name, info.same))
                shapes[name] = info.shape
                sketch = event["sketch"]
                told = PartRecord(
                    rank.rank, info.name, info.blocks, sketch[:8], float(sketch[8]), event["dtype"], event.get("values")
                )
                copies[name].append(told)
        return {name: WholeTensor.of(mine, shapes[name]) for name, mine in copies.items()}

    def weights(self, step: int) -> dict[str, WholeTensor]:
        """The weights and buffers before a step, by name."""
        return self.tensors(step - 1, "after") if step else self.tensors(0, "before")

    def changes(self, step: int) -> dict[str, tuple[WholeTensor, Array]]:
        """For each parameter, the weight after a step, and the sketch of how the step changed it."""
        before, after = self.weights(step), self.weights(step + 1)
        return {name: (whole, whole.sketch - before[name].sketch) for name, whole in after.items() if name in before}

    def masses(self, step: int) -> dict[str, float]:
        """For each weight, the root of the summed squares of the terms that its gradient adds up."""
        squares: defaultdict[str, float] = defaultdict(float)
        for _, event in self.events(step, "samples", "mass"):
            name: str = event["name"]
            squares[self.first.get(name, name)] += event["mass"]
        return {name: sqrt(value) for name, value in squares.items()}

    def outputs(self, step: int) -> dict[Key, list[Called]]:
        """The calls of each module, and of functions and inputs within, called "MODULE: FUNCTION"."""
        found: defaultdict[Key, list[Called]] = defaultdict(list)
        for rank, event in self.events(step, "output"):
            name = self.ranks[rank].module(event["module"])
            if self.modules is None or name in self.modules:
                inside = f": {event['function']}" if "function" in event else ""
                found[name + inside, event["place"]].append((rank, event))
        return dict(found)

    def losses(self, step: int) -> dict[int, list[float]]:
        """The losses of each rank that has any; zeros at which the backward of a stage starts are none."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for rank, event in self.events(step, "loss"):
            found[rank].append(event["value"])
        return {rank: values for rank, values in found.items() if any(values)} or dict(found)


def load(folder: Path) -> RecordedRun:
    """Reads a recording.

    Raises UsageError for files that are missing, damaged or cut off, and for ranks that recorded different steps.
    """
    ranks = [Rank(rank, *read_rank(path, rank)) for rank, path in rank_files(folder)]
    worlds = {each.start["world"] for each in ranks}
    world = max(worlds)
    if missing := sorted(set(range(world)) - {each.rank for each in ranks}):
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise UsageError(
            f"{folder} lacks the files of ranks {', '.join(map(str, missing[:8]))}{more} of {world}: copy them there"
        )
    if len(worlds) > 1 or len(ranks) != world:
        raise UsageError(f"{folder} has files of several recordings: record into an empty folder")
    if len({len(each.steps) for each in ranks}) > 1:
        counts = ", ".join(f"{len(each.steps)} on rank {each.rank}" for each in ranks)
        raise UsageError(f"the ranks of {folder} recorded different numbers of steps: {counts}; record the same on all")
    run = RecordedRun(folder, ranks)
    for rank in ranks:
        rank.names = {name: run.first[name] for name in rank.tensors}
    return run


@dataclass(frozen=True)
class OutputRows:
    """All rows of one output of a module.

    Attributes:
        values: sketches of the rows with their squared norms, [rows, 9].
        ranks: for each row, the ranks that made it.
        calls: for each row, the index of the call on its rank.
        tail: the shape of a row.
    """

    values: Array
    ranks: list[tuple[int, ...]]
    calls: list[int]
    tail: tuple[int, ...]

    @property
    def size(self) -> float:
        """The root mean square of the rows' norms."""
        return float(np.sqrt(np.mean(self.values[:, 8]))) if len(self.values) else 0.0


def tail_of(event: Event) -> tuple[int, ...]:
    """The shape of a row of a rank's part of an output."""
    return tuple(event["shape"][1:])


def joined(events: Sequence[Called], tail: tuple[int, ...]) -> OutputRows | None:
    """The rows of these calls, whose rows have the shape `tail` in the whole. Parts of rows on several ranks are added
    up. None if it is not known how the parts lie.
    """
    whole = [(rank, event) for rank, event in events if tail_of(event) == tail]
    parts = [(rank, event) for rank, event in events if tail_of(event) != tail]
    of_parts = _side_by_side(parts, tail)
    if of_parts is None or any(len(event["rows"]) != event["shape"][0] for _, event in whole if event["shape"]):
        return None
    return summed([*([each] for each in whole), *of_parts], tail)


def _side_by_side(parts: Sequence[Called], tail: tuple[int, ...]) -> list[Sequence[Called]] | None:
    """The calls that made parts of the same rows, if these are known to lie side by side."""
    if any(not event.get("known") or event.get("partial") or len(tail_of(event)) != len(tail) for _, event in parts):
        return None
    found: list[Sequence[Called]] = []
    for by_place in _by_call(parts, lambda _, event: tuple(event["begin"])):
        volume = sum(prod(tail_of(each[0][1])) for each in by_place.values())
        if len({len(each) for each in by_place.values()}) > 1 or volume != prod(tail):
            return None
        found += zip(*by_place.values(), strict=True)
    return found


def by_group(events: Sequence[Called], places: Mapping[int, Any]) -> list[Sequence[Called]]:
    """The calls that ranks with different parts of one weight made together: ranks are taken by what they hold."""
    calls = _by_call(events, lambda rank, _: places[rank])
    return [group for by_place in calls for group in zip(*by_place.values(), strict=False)]


def _by_call(events: Sequence[Called], place: Callable[[int, Event], object]) -> list[dict[object, list[Called]]]:
    """For each index of a call, the calls by place."""
    found: defaultdict[int, defaultdict[object, list[Called]]] = defaultdict(lambda: defaultdict(list))
    for rank, event in events:
        found[event["call"]][place(rank, event)].append((rank, event))
    return [*found.values()]


def summed(groups: Sequence[Sequence[Called]], tail: tuple[int, ...]) -> OutputRows | None:
    """The rows of groups of calls whose rows add up: parts that lie side by side, or outputs of layers that are split
    along their inputs, whose norms are not known then. None if there are none, or of different shapes.
    """
    values, ranks, calls = [], [], []
    for group in groups:
        rows = [event["rows"] for _, event in group]
        if len({each.shape for each in rows}) > 1:
            return None
        values.append(np.sum(rows, axis=0))
        ranks += [tuple(rank for rank, _ in group)] * len(values[-1])
        calls += [group[0][1]["call"]] * len(values[-1])
    return OutputRows(np.concatenate(values), ranks, calls, tail) if values else None


class Unmatched(NamedTuple):
    """What has no like: indices of rows of each run, and the largest distance to the nearest one, relative to a row."""

    reference: list[int]
    candidate: list[int]
    error: float


def unmatched(reference: OutputRows, candidate: OutputRows, allowed: float) -> Unmatched:
    """The rows of each run that no row of the other equals, up to `allowed` of the size of a row. Raises UsageError for
    too many rows.
    """
    size = max(reference.size, TINY)
    nearest_in_reference = _nearest(candidate.values, reference.values, allowed * size) / size
    nearest_in_candidate = _nearest(reference.values, candidate.values, allowed * size) / size
    mine = [index for index, apart in enumerate(nearest_in_candidate) if not apart <= allowed]
    theirs = [index for index, apart in enumerate(nearest_in_reference) if not apart <= allowed]
    return Unmatched(mine, theirs, float(np.max([*nearest_in_reference, *nearest_in_candidate])))


def _nearest(rows: Array, others: Array, near: float) -> Array:
    """The distance of each row to the nearest of the others. If there are many, a row that has others as near as `near`
    gets its distance to one of them; some of the rest are compared with all, and their largest distance stands for all.
    """
    rows, others = rows[:, :8], others[:, :8]
    if len(rows) * len(others) <= _PAIRS:
        return _distances(rows, others)
    found = np.full(len(rows), np.nan)
    if near < np.inf:
        if len(rows) == len(others):
            found = _size(rows - others)
        order, left = np.argsort(others[:, 0]), np.flatnonzero(~(found <= near))
        first, reach = others[order, 0], near * sqrt(8)  # a row that is as near has such a first number
        low = np.searchsorted(first, rows[left, 0] - reach)
        high = np.searchsorted(first, rows[left, 0] + reach, "right")
        if (high - low).sum() > _MOST:
            raise UsageError(f"outputs have {len(rows):,} rows, of which too many are alike: record fewer samples")
        for index, begin, end in zip(left, low, high, strict=True):
            if end > begin:
                found[index] = np.fmin.reduce(_size(others[order[begin:end]] - rows[index]))
    left = np.flatnonzero(~(found <= near))
    chosen = left[:: max(1, len(left) * len(others) // _PAIRS)]
    if len(chosen):
        apart = _distances(rows[chosen], others)
        found[left] = np.fmax.reduce(apart)
        found[chosen] = apart
    return found


def _distances(rows: Array, others: Array) -> Array:
    """The distance of each row to the nearest of the others, each compared with all."""
    chunks = range(0, len(rows), _CHUNK)
    apart = [_size(rows[start : start + _CHUNK, None] - others[None]) for start in chunks]
    return np.concatenate([np.fmin.reduce(each, axis=1) for each in apart])  # without those of nan


def _size(apart: Array) -> Array:
    found: Array = np.sqrt(np.mean(np.square(apart), axis=-1))
    return found


def numel(events: Sequence[Called]) -> int:
    """How many numbers the calls returned together."""
    return sum(prod(event["shape"]) for _, event in events)


def square(events: Sequence[Called]) -> float:
    """The squared norm of all that the calls returned."""
    return float(sum(event["rows"][:, 8].sum() for _, event in events))


def rounding_of(run: RecordedRun, given: float | None = None) -> Rounding:
    """The tolerances of a run, from the first step that it recorded, or the one that is given."""
    found = Rounding(given)
    lengths = _lengths(run)
    total, layers = 0.0, 0
    for _, event in run.events(0, "output"):
        name = event["module"]
        if name in found.order or "function" in event:
            continue
        found.order[name] = len(found.order)
        found.coarsest = max(found.coarsest, unit(event["dtype"]))
        layers += 1
        total += lengths.get(name, event["shape"][-1] if event["shape"] else 1)
        found.outputs[name] = tolerance(found.coarsest, layers, total)
    found.whole = max(found.outputs.values(), default=tolerance(found.coarsest, 16, 4096))
    return found


def _lengths(run: RecordedRun) -> dict[str, int]:
    """The length of the products of each module with weights."""
    lengths: defaultdict[str, int] = defaultdict(int)
    for rank in run.ranks:
        for info in rank.tensors.values():
            lengths[info.name.rpartition(".")[0]] += prod(info.shape[1:])
    return lengths
