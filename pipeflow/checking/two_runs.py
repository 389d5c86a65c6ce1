"""Two runs beside each other: the candidate's names matched to those of the reference, its stages, what both count, and
how far rounding explains differences. Must not contain: what differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, sqrt
from typing import Any

import numpy as np

from pipeflow.checking.files import INPUT, INSIDE, Array, Blocks, Info
from pipeflow.checking.findings import Difference
from pipeflow.checking.limits import FLOAT32, SAFETY, SAME_START, SKETCH, TINY, Rounding, unit
from pipeflow.checking.runs import Called, RecordedRun, joined, norm, owner, rounding_of, tail_of, unmatched
from pipeflow.core.errors import UsageError


def match(reference: RecordedRun, candidate: RecordedRun) -> set[str]:
    """Gives the candidate's ranks the names of the reference for their tensors and modules. Returns the names of those
    tensors that the reference lacks.
    """
    known = {info.name: info for rank in reference.ranks for info in rank.tensors.values()}
    values = {name: whole.sketch for name, whole in reference.weights(0).items()}
    held = {name for rank in candidate.ranks for name in rank.tensors}
    lacking = set()
    candidate.modules = reference.types
    for rank in candidate.ranks:
        before = rank.steps[0].get("before", ()) if rank.steps else ()
        own = {event["name"]: event["sketch"][:8] for event in before}
        rank.names = {}
        for info in rank.tensors.values():
            is_whole = info.blocks == (((0,) * len(info.shape), info.shape),)
            value = own.get(info.name) if is_whole else None
            name = _renamed(info, known, rank.prefixes) or _by_value(info, value, known, values, held, reference.first)
            if name is not None:
                _learn(rank.prefixes, info.name, name)
        for info in rank.tensors.values():
            name = _renamed(info, known, rank.prefixes) or (info.name if _fits(info, known.get(info.name)) else None)
            if name is None:
                name = _by_suffix(info, known)
            if name is None:
                lacking.add(info.name)
            else:
                rank.names[info.name] = reference.first[name]
    return lacking


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


def measure(rounding: Rounding, reference: RecordedRun, exact: RecordedRun) -> None:
    """Lowers the tolerances of a run to SAFETY times its distance from the exact run, in their first steps.

    Raises UsageError if the exact run is of another model, or no finer.
    """
    mine, theirs = (
        {key: calls for key, calls in run.outputs(0).items() if INSIDE not in key[0]} for run in (reference, exact)
    )
    gradients, others = (run.tensors(0, "gradient") for run in (reference, exact))
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


def _coarsest(run: RecordedRun) -> float:
    return max((unit(event["dtype"]) for _, event in run.events(0, "output")), default=FLOAT32)


class TwoRuns:
    """Two runs, the names of both, and how far rounding explains differences.

    Args:
        reference: the plain run.
        candidate: the run that is checked.
        tolerance: relative; None derives one for each value.
        exact: the plain run in a finer dtype, to measure how far rounding goes.

    Attributes:
        lacking: names of tensors of the reference that the candidate lacks.
        notes: what could not be compared, in sentences.
        compared: how many outputs, gradients and so on were compared.
        alike: the steps and names of outputs, functions and inputs that were compared, and are alike.

    Raises UsageError if the runs are of different models or numbers of steps.
    """

    def __init__(
        self,
        reference: RecordedRun,
        candidate: RecordedRun,
        tolerance: float | None = None,
        exact: RecordedRun | None = None,
    ) -> None:
        self.reference, self.candidate = self.runs = reference, candidate
        _require_same_steps(reference, candidate)
        self.notes: list[str] = []
        self.compared: defaultdict[str, int] = defaultdict(int)
        self.alike: set[tuple[int, str]] = set()
        self._match_names()
        self.rounding: Rounding = rounding_of(reference, tolerance)
        if exact is not None:
            measure(self.rounding, reference, exact)

    def _match_names(self) -> None:
        """Matches the names, and notes those without a match."""
        unmatched = sorted(match(self.reference, self.candidate))
        met = {name for names in self.held.values() for name in names}
        self.lacking = lacking = sorted({*self.reference.first.values()} - met)
        if not met or len(met) < len(lacking) / 4:
            theirs = ", ".join(unmatched[:3]) or "none"
            raise UsageError(
                f"{self.candidate.folder} is a recording of another model than {self.reference.folder}: they share "
                f"{len(met)} tensors, and the candidate's {theirs} have no like; pass names to record if only names "
                "differ"
            )
        shapes = [name for name in unmatched if name in self.reference.first]
        for which, names in (("candidate", lacking), ("reference", unmatched)):
            if own := [name for name in names if name not in shapes]:
                self.notes.append(f"the {which} has no {names_listed(own)}")
        if shapes:
            self.notes.append(
                f"{names_listed(shapes)} have other shapes: pass parts to record if ranks have parts of them"
            )

    @cached_property
    def weights(self) -> set[str]:
        """The names of the weights and buffers of which the candidate's ranks have all parts as it begins. Only these
        are compared.
        """
        mine, theirs = (run.weights(0) for run in self.runs)
        return {name for name in mine if name in theirs and theirs[name].covered}

    @cached_property
    def stages(self) -> dict[tuple[int, int], int]:
        """The pipeline stage of each rank of the candidate and each of its modules, by the tensors that it holds; empty
        without stages, whose tensors are others but for tied ones.
        """
        by_place: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for rank in self.candidate.ranks:
            for own, name in rank.names.items():
                by_place[rank.rank, rank.tensors[own].chunk].add(name)
        held: defaultdict[frozenset[str], list[tuple[int, int]]] = defaultdict(list)
        for where, names in by_place.items():
            held[frozenset(names)].append(where)
        untied = self.reference.parameters - {*self.reference.ties}
        shared = {name for one in held for other in held if one != other for name in one & other}
        if len(held) < 2 or shared & untied:  # ranks with some of the experts share the rest
            return {}
        place = {name: index for index, name in enumerate(self.reference.first.values())}
        ordered = sorted(held, key=lambda names: sum(place[name] for name in names) / max(1, len(names)))
        return {where: stage for stage, names in enumerate(ordered) for where in held[names]}

    def stage_of(self, ranks: Sequence[int], name: str = "") -> int | None:
        """The stage of these ranks that has a parameter or module; for a module without weights, that of the one around
        it, and for a loss the last.
        """
        while name:
            for rank in ranks:
                for own, known in self.candidate.ranks[rank].names.items():
                    if known == name or known.startswith(f"{name}."):
                        info = self.candidate.ranks[rank].tensors[own]
                        return self.stages.get((rank, info.chunk)) if info.stage is None else info.stage
            name = owner(name)
        return max((stage for (rank, _), stage in self.stages.items() if rank in ranks), default=None)

    def difference(
        self, step: int, what: str, name: str, ranks: Iterable[int], error: float, allowed: float, **more: Any
    ) -> Difference:
        """The difference of a module, a function or input within it, or a parameter; or of none, if `name` is empty."""
        places = tuple(sorted({*ranks}))
        is_of_parameter = what in ("weight", "gradient", "optimizer", "update")
        module, parameter = (owner(name), name) if is_of_parameter else (name.removesuffix(f"{INSIDE}{INPUT}"), "")
        if INSIDE in name:
            what = "function" if module == name else "input"
        if parameter and name not in self.reference.parameters and what != "optimizer":
            what = "buffer"
        stage = self.stage_of(places, name)
        return Difference(step, what, module, parameter, stage, places, error, allowed, **more)

    @cached_property
    def held(self) -> dict[int, set[str]]:
        """For each rank of the candidate, the names of the tensors of which it has a part."""
        return {rank.rank: {*rank.names.values()} for rank in self.candidate.ranks}

    def inputs(self, calls: Sequence[Called], run: RecordedRun) -> list[str]:
        """As what the inputs of a module or function were noted, with the names of the reference; "": as nothing."""
        rank, event = calls[0]
        named = (each.partition(INSIDE) for each in event.get("inputs", [""]))
        return [run.ranks[rank].module(module) + inside + function for module, inside, function in named]

    def are_inputs_alike(self, step: int, mine: Sequence[Called], theirs: Sequence[Called]) -> bool:
        """Whether all floating inputs of a module or function were compared, and are alike."""
        inputs = self.inputs(theirs, self.candidate)
        are_alike = bool(inputs) and all(each and (step, each) in self.alike for each in inputs)
        return are_alike and inputs == self.inputs(mine, self.reference) and self.compared["batches"] > 0

    def is_whole(self, module: str, calls: Sequence[Called]) -> bool:
        """Whether the ranks of these calls have all of a module, and not a stage of it, or some of its experts."""
        start = f"{module}." if module else ""
        inside = {name for name in self.reference.first.values() if name.startswith(start)}
        if not inside and not self.reference.types[module].get("leaf"):
            return False
        return all(inside <= self.held[rank] for rank, _ in calls)

    def has_parts_of_rows(self, step: int) -> bool:
        """Whether ranks of the candidate have parts of rows of a layer's outputs, such as some tokens or heads."""
        mine, theirs = (
            {(key, tail_of(event)) for key, calls in run.outputs(step).items() for _, event in calls}
            for run in self.runs
        )
        known = {key for key, _ in mine if self.reference.types.get(key[0], {}).get("leaf")}
        return any(key in known and (key, tail) not in mine for key, tail in theirs)

    def places(self, module: str) -> dict[int, Blocks]:
        """For each rank of the candidate, the part that it holds of a module's weight."""
        return {
            rank.rank: rank.tensors[own].blocks
            for rank in self.candidate.ranks
            for own, name in rank.names.items()
            if owner(name) == module and name.endswith("weight")
        }

    def counts(self, step: int) -> dict[str, float]:
        """What the jobs count, by name: things by which a gradient may be multiplied by mistake."""
        mine, theirs = (run.outputs(step) for run in self.runs)
        found: dict[str, float] = {}
        if theirs:
            key, events = next(iter(theirs.items()))
            found["microbatches of a rank"] = max(Counter(rank for rank, _ in events).values())
            found["microbatches of the plain run"] = len(mine.get(key, ()))
        groups = {size: name for name, size in self.candidate.sizes.items() if size > 1}
        found |= {f"ranks of the group {name}": size for size, name in groups.items()}
        found["ranks"] = self.candidate.world
        after = self.candidate.tensors(step, "after").values()
        for count in {whole.kinds for whole in after}:
            found[f"ranks that share a tensor ({count})"] = count
        for count in {len(whole.copies) // max(1, whole.kinds) for whole in after}:
            found[f"replicas ({count})"] = count
        labels = [event for _, event in self.reference.events(step, "labels")]
        found["valid tokens"] = sum(event["valid"] for event in labels)
        found["all tokens"] = sum(event["numbers"].get("labels", 0) for event in labels)
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


def names_listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
