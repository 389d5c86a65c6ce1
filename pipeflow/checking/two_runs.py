"""Two runs beside each other: the names of both, their tensors put together from the ranks' parts, the stages of the
candidate, and how far rounding explains differences. Must not contain: what differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod, sqrt

import numpy as np

from pipeflow.checking.files import Array, Blocks, Info, RecordedRun
from pipeflow.checking.findings import Difference
from pipeflow.checking.limits import FLOAT32, SAFETY, SAME_START, SKETCH, TINY, Rounding, rounding_of, unit
from pipeflow.checking.rows import Called, joined, tail_of, unmatched
from pipeflow.core.errors import UsageError


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


def norm(sketch: Array) -> float:
    """The estimated norm of what a sketch, or each row of sketches, stands for."""
    return float(np.sqrt(np.mean(np.square(sketch))))


@dataclass
class Matching:
    """What the names of the candidate's ranks mean.

    Attributes:
        first: for each name of a tensor in the reference, the first name of the same tensor.
        tensors: for each rank and name of the candidate, the name in the reference.
        prefixes: for each rank, the prefixes that it writes for others.
        unmatched: names of the candidate that the reference lacks.
        lacking: names of the reference that the candidate lacks.
        ties: names in the reference of tensors with several names.
    """

    first: dict[str, str]
    tensors: dict[tuple[int, str], str] = field(default_factory=dict)
    prefixes: dict[int, dict[str, str]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    ties: dict[str, list[str]] = field(default_factory=dict)

    def module(self, rank: int, name: str) -> str:
        """The name in the reference of a module that a rank calls `name`."""
        for own, theirs in self.prefixes.get(rank, {}).items():
            if name == own or name.startswith(f"{own}."):
                return theirs + name[len(own) :]
            if not own:
                return f"{theirs}.{name}" if name else theirs
        return name


def match(reference: RecordedRun, candidate: RecordedRun) -> Matching:
    """Matches the candidate's names to those of the reference."""
    found = Matching(_first_names(reference))
    known = {info.name: info for rank in reference.ranks for info in rank.tensors.values()}
    values = {name: whole.sketch for name, whole in wholes(reference, 0, "before", None).items()}
    held = {name for rank in candidate.ranks for name in rank.tensors}
    for rank in candidate.ranks:
        before = rank.steps[0].get("before", ()) if rank.steps else ()
        own = {event["name"]: event["sketch"][:8] for event in before}
        prefixes = found.prefixes.setdefault(rank.rank, {})
        for info in rank.tensors.values():
            is_whole = info.blocks == (((0,) * len(info.shape), info.shape),)
            value = own.get(info.name) if is_whole else None
            name = _renamed(info, known, prefixes) or _by_value(info, value, known, values, held, found.first)
            if name is not None:
                _learn(prefixes, info.name, name)
        for info in rank.tensors.values():
            name = _renamed(info, known, prefixes) or (info.name if _fits(info, known.get(info.name)) else None)
            if name is None:
                name = _by_suffix(info, known)
            if name is None:
                found.unmatched.append(info.name)
            else:
                found.tensors[rank.rank, info.name] = found.first[name]
    met = set(found.tensors.values())
    found.lacking = sorted(set(found.first.values()) - met)
    found.unmatched = sorted(set(found.unmatched))
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, first in found.first.items():
        groups[first].append(name)
    found.ties = {first: names for first, names in groups.items() if len(names) > 1}
    return found


def _first_names(run: RecordedRun) -> dict[str, str]:
    """For each name, the first name of the same tensor; ranks that share one of the names share all."""
    first: dict[str, str] = {}
    for rank in run.ranks:
        mine: dict[int, str] = {}
        for info in rank.tensors.values():
            known = first.get(info.name, info.name)
            first.setdefault(info.name, mine.setdefault(info.same, known))
    return first


def _fits(info: Info, other: Info | None) -> bool:
    return other is not None and info.shape == other.shape


def _renamed(info: Info, known: Mapping[str, Info], prefixes: Mapping[str, str]) -> str | None:
    """The name under a prefix that is already known."""
    for own, theirs in prefixes.items():
        start = f"{own}." if own else ""
        if info.name.startswith(start):
            name = f"{theirs}." * bool(theirs) + info.name[len(start) :]
            if _fits(info, known.get(name)):
                return name
    return None


def _by_value(
    info: Info,
    value: Array | None,
    known: Mapping[str, Info],
    values: Mapping[str, Array],
    held: Iterable[str],
    first: Mapping[str, str],
) -> str | None:
    """The one tensor of the reference with these initial values that no rank has under its own name, if the tensor of
    this name has others or another shape.
    """
    if value is None or len(np.unique(np.abs(value))) < 3:  # constants are like others
        return None
    same = known.get(info.name)
    if same is not None and _fits(info, same) and _close(values[first[info.name]], value):
        return None
    near = [
        name
        for name, other in known.items()
        if name not in held
        and first[name] == name
        and _fits(info, other)
        and name in values
        and _close(values[name], value)
    ]
    return near[0] if len(near) == 1 else None


def _close(one: Array, other: Array) -> bool:
    return norm(one - other) <= SAME_START * norm(one)


def _learn(prefixes: dict[str, str], own: str, theirs: str) -> None:
    """Notes the shortest different starts of the two names of one tensor."""
    mine, other = own.split("."), theirs.split(".")
    while len(mine) > 0 and len(other) > 0 and mine[-1] == other[-1]:
        mine.pop()
        other.pop()
    prefixes.setdefault(".".join(mine), ".".join(other))


def _by_suffix(info: Info, known: Mapping[str, Info]) -> str | None:
    """The one name of the reference that ends like this name, or with which this name ends."""
    near = [
        name
        for name, other in known.items()
        if _fits(info, other) and (name.endswith(f".{info.name}") or info.name.endswith(f".{name}"))
    ]
    return near[0] if len(near) == 1 else None


def wholes(run: RecordedRun, step: int, kind: str, matching: Matching | None) -> dict[str, WholeTensor]:
    """The tensors of the whole model that events of this kind tell of, by name in the reference."""
    copies: defaultdict[str, list[PartRecord]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    first = _first_names(run) if matching is None else {}
    for rank in run.ranks:
        done: set[tuple[str, int]] = set()
        for event in rank.steps[step].get(kind, ()) if step < len(rank.steps) else ():
            info = rank.tensors[event["name"]]
            name = first[info.name] if matching is None else matching.tensors.get((rank.rank, info.name))
            if name is None or (name, info.same) in done:
                continue
            done.add((name, info.same))
            shapes[name] = info.shape
            sketch = event["sketch"]
            told = PartRecord(
                rank.rank, info.name, info.blocks, sketch[:8], float(sketch[8]), event["dtype"], event.get("values")
            )
            copies[name].append(told)
    return {name: WholeTensor.of(mine, shapes[name]) for name, mine in copies.items()}


def measure(rounding: Rounding, reference: RecordedRun, exact: RecordedRun) -> None:
    """Lowers the tolerances of a run to SAFETY times its distance from the exact run, in their first steps.

    Raises UsageError if the exact run is of another model, or no finer.
    """
    mine, theirs = (_calls(run) for run in (reference, exact))
    gradients, others = (wholes(run, 0, "gradient", None) for run in (reference, exact))
    if mine.keys() != theirs.keys() or gradients.keys() != others.keys():
        raise UsageError(f"{exact.folder} is a run of another model than {reference.folder}: record the same job")
    if not _coarsest(exact) < _coarsest(reference):
        raise UsageError(f"{exact.folder} is no finer than {reference.folder}: record it with a model of more bits")
    for key, calls in mine.items():
        rows, finer = joined(calls, tail_of(calls[0][1])), joined(theirs[key], tail_of(calls[0][1]))
        if rows is not None and finer is not None and rows.size and len(rows.values) == len(finer.values):
            error = SAFETY * unmatched(rows, finer, inf).error + SKETCH
            rounding.outputs[key[0]] = min(rounding.outputs[key[0]], error)
    errors = {name: norm(whole.sketch - others[name].sketch) for name, whole in gradients.items()}
    total = sqrt(
        sum(error**2 for error in errors.values()) / max(TINY, sum(each.square for each in gradients.values()))
    )
    for name, whole in gradients.items():
        rounding.gradients[name] = SAFETY * max(errors[name], total * whole.norm) + SKETCH * whole.norm


def _calls(run: RecordedRun) -> dict[tuple[str, int], list[Called]]:
    found: defaultdict[tuple[str, int], list[Called]] = defaultdict(list)
    for rank, event in run.events(0, "output"):
        found[event["module"], event["place"]].append((rank, event))
    return dict(found)


def _coarsest(run: RecordedRun) -> float:
    return max((unit(event["dtype"]) for _, event in run.events(0, "output")), default=FLOAT32)


Key = tuple[str, int]  # a module and which of its outputs


class TwoRuns:
    """Two runs, the names of both, and how far rounding explains differences.

    Args:
        reference: the plain run.
        candidate: the run that is checked.
        tolerance: relative; None derives one for each value.
        exact: the plain run in a finer dtype, to measure how far rounding goes.

    Raises UsageError if the runs are of different models or numbers of steps.
    """

    def __init__(
        self,
        reference: RecordedRun,
        candidate: RecordedRun,
        tolerance: float | None = None,
        exact: RecordedRun | None = None,
    ) -> None:
        self.reference, self.candidate = reference, candidate
        _require_same_steps(reference, candidate)
        self.names: Matching = match(reference, candidate)
        self._require_same_model()
        self.rounding: Rounding = rounding_of(reference, tolerance)
        if exact is not None:
            measure(self.rounding, reference, exact)
        self.notes: list[str] = []
        self.compared: defaultdict[str, int] = defaultdict(int)
        self._note_names()

    def _require_same_model(self) -> None:
        met = len({*self.names.tensors.values()})
        if not met or met < len(self.names.lacking) / 4:
            theirs = ", ".join(self.names.unmatched[:3]) or "none"
            raise UsageError(
                f"{self.candidate.folder} is a recording of another model than {self.reference.folder}: they share "
                f"{met} tensors, and the candidate's {theirs} have no like; pass names to record if only names differ"
            )

    def _note_names(self) -> None:
        if self.names.lacking:
            self.notes.append(f"the candidate has no {_listed(self.names.lacking)}")
        if self.names.unmatched:
            self.notes.append(f"the reference has no {_listed(self.names.unmatched)}")
        if shapes := [name for name in self.names.unmatched if name in self.names.first]:
            self.notes.append(f"{_listed(shapes)} have other shapes: pass parts to record if ranks have parts of them")

    @cached_property
    def stages(self) -> dict[tuple[int, int], int]:
        """The pipeline stage of each rank of the candidate and each of its modules, by the tensors that it holds; empty
        without stages, whose tensors are others but for tied ones.
        """
        by_place: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for rank in self.candidate.ranks:
            for info in rank.tensors.values():
                if (rank.rank, info.name) in self.names.tensors:
                    by_place[rank.rank, info.chunk].add(self.names.tensors[rank.rank, info.name])
        held: defaultdict[frozenset[str], list[tuple[int, int]]] = defaultdict(list)
        for where, names in by_place.items():
            held[frozenset(names)].append(where)
        if len(held) < 2 or any(len(one & other) * 2 > len(one) for one in held for other in held if one != other):
            return {}
        place = {name: index for index, name in enumerate(self.names.first.values())}
        ordered = sorted(held, key=lambda names: sum(place[name] for name in names) / max(1, len(names)))
        return {where: stage for stage, names in enumerate(ordered) for where in held[names]}

    def stage_of(self, ranks: Sequence[int], name: str = "") -> int | None:
        """The stage of these ranks that has a parameter or module; for a module without weights, that of the one around
        it, and for a loss the last.
        """
        while name:
            for rank in ranks:
                for info in self.candidate.ranks[rank].tensors.values():
                    known = self.names.tensors.get((rank, info.name), "")
                    if known == name or known.startswith(f"{name}."):
                        return self.stages.get((rank, info.chunk)) if info.stage is None else info.stage
            name = self.owner(name)
        return max((stage for (rank, _), stage in self.stages.items() if rank in ranks), default=None)

    def difference(
        self, step: int, what: str, name: str, ranks: Iterable[int], error: float, allowed: float, **more: bool
    ) -> Difference:
        """The difference of a module or a parameter, or of neither, if `name` is empty."""
        places = tuple(sorted({*ranks}))
        module, parameter = (self.owner(name), name) if what in ("weight", "gradient", "update") else (name, "")
        if parameter and not self.is_parameter(name):
            what = "buffer"
        stage = self.stage_of(places, name)
        return Difference(step, what, module, parameter, stage, places, error, allowed, **more)

    def is_parameter(self, name: str) -> bool:
        """Whether a tensor of the reference is trained."""
        return any(
            info.parameter for rank in self.reference.ranks for info in rank.tensors.values() if info.name == name
        )

    def owner(self, parameter: str) -> str:
        """The module that owns a parameter."""
        return parameter.rpartition(".")[0]

    def mine(self, step: int, kind: str) -> dict[str, WholeTensor]:
        """The reference's tensors by name."""
        return wholes(self.reference, step, kind, None)

    def theirs(self, step: int, kind: str) -> dict[str, WholeTensor]:
        """The candidate's tensors by name in the reference."""
        return wholes(self.candidate, step, kind, self.names)

    def outputs(self, run: RecordedRun, step: int) -> dict[Key, list[Called]]:
        """The calls of each module, by name in the reference."""
        found: defaultdict[Key, list[Called]] = defaultdict(list)
        for rank, event in run.events(step, "output"):
            name = event["module"] if run is self.reference else self.names.module(rank, event["module"])
            if run is self.reference or name in self.reference.types:
                found[name, event["place"]].append((rank, event))
        return dict(found)

    def is_whole(self, module: str, calls: Sequence[Called]) -> bool:
        """Whether the ranks of these calls have all of a module, and not a stage of it, or some of its experts."""
        return all(self._holds_all(rank, module) for rank in {rank for rank, _ in calls})

    @cached_property
    def held(self) -> dict[int, set[str]]:
        found: defaultdict[int, set[str]] = defaultdict(set)
        for (rank, _), name in self.names.tensors.items():
            found[rank].add(name)
        return dict(found)

    def _holds_all(self, rank: int, module: str) -> bool:
        """Whether a rank has all of a module, and not a stage of it."""
        start = f"{module}." if module else ""
        inside = {name for name in self.names.first.values() if name.startswith(start)}
        is_leaf = bool(self.reference.types[module].get("leaf"))
        return inside <= self.held.get(rank, set()) and (bool(inside) or is_leaf)

    def places(self, module: str) -> dict[int, Blocks]:
        """For each rank of the candidate, the part that it holds of a module's weight."""
        found = {}
        for (rank, own), name in self.names.tensors.items():
            if self.owner(name) == module and name.endswith("weight"):
                found[rank] = self.candidate.ranks[rank].tensors[own].blocks
        return found

    def changes(self, run: RecordedRun, step: int) -> dict[str, tuple[WholeTensor, Array]]:
        """For each parameter, the weight after a step, and the sketch of how the step changed it."""
        names = None if run is self.reference else self.names
        after = wholes(run, step, "after", names)
        before = wholes(run, step - 1, "after", names) if step else wholes(run, 0, "before", names)
        return {name: (whole, whole.sketch - before[name].sketch) for name, whole in after.items() if name in before}

    def counts(self, step: int) -> dict[str, float]:
        """What the jobs count, by name: things by which a gradient may be multiplied by mistake."""
        mine, theirs = self.outputs(self.reference, step), self.outputs(self.candidate, step)
        found: dict[str, float] = {}
        if theirs:
            key, events = next(iter(theirs.items()))
            found["microbatches of a rank"] = max(Counter(rank for rank, _ in events).values())
            found["microbatches of the plain run"] = len(mine.get(key, ()))
        groups = {size: name for name, size in self.candidate.sizes.items() if size > 1}
        found |= {f"ranks of the group {name}": size for size, name in groups.items()}
        found["ranks"] = self.candidate.world
        after = self.theirs(step, "after").values()
        for count in {whole.kinds for whole in after}:
            found[f"ranks that share a tensor ({count})"] = count
        for count in {len(whole.copies) // max(1, whole.kinds) for whole in after}:
            found[f"replicas ({count})"] = count
        found["valid tokens"] = sum(event["valid"] for _, event in self.reference.events(step, "labels"))
        batches = [event for _, event in self.reference.events(step, "batch")]
        if batches:
            place = batches[-1]["place"]
            found["samples"] = float(sum(event["shape"][0] for event in batches if event["place"] == place))
        return {name: size for name, size in found.items() if size > 1}


def _require_same_steps(reference: RecordedRun, candidate: RecordedRun) -> None:
    if reference.num_steps != candidate.num_steps:
        raise UsageError(
            f"{reference.folder} has {reference.num_steps} steps, {candidate.folder} has {candidate.num_steps}: record "
            "the same steps of both runs"
        )
    if not reference.num_steps:
        raise UsageError(f"{reference.folder} has no step: call the optimizer within the with block of record")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
