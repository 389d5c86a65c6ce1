"""Matching: which tensor and module of the reference a rank of the candidate means by a name. Names are compared
first, without what engines put before them; then initial values, for stages that count their layers from 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pipeflow.checking.files import Array
from pipeflow.checking.runs import Copy, Info, Run, Whole, norm

CLOSE = 1e-3  # relative distance of initial values that are called the same


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


def match(reference: Run, candidate: Run) -> Matching:
    """Matches the candidate's names to those of the reference."""
    found = Matching(_first_names(reference))
    known = {info.name: info for rank in reference.ranks for info in rank.tensors.values()}
    values = {name: whole.sketch for name, whole in wholes(reference, 0, "before", None).items()}
    held = {name for rank in candidate.ranks for name in rank.tensors}
    for rank in candidate.ranks:
        own = (
            {
                event["name"]: Copy(rank.rank, "", (), event["sketch"][:8], 0.0, "")
                for event in rank.steps[0].get("before", ())
            }
            if rank.steps
            else {}
        )
        prefixes = found.prefixes.setdefault(rank.rank, {})
        for info in rank.tensors.values():
            is_whole = info.blocks == (((0,) * len(info.shape), info.shape),)
            value = own[info.name].sketch if is_whole and info.name in own else None
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


def _first_names(run: Run) -> dict[str, str]:
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
    return norm(one - other) <= CLOSE * norm(one)


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


def wholes(run: Run, step: int, kind: str, matching: Matching | None) -> dict[str, Whole]:
    """The tensors of the whole model that events of this kind tell of, by name in the reference."""
    copies: defaultdict[str, list[Copy]] = defaultdict(list)
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
            told = Copy(
                rank.rank, info.name, info.blocks, sketch[:8], float(sketch[8]), event["dtype"], event.get("values")
            )
            copies[name].append(told)
    return {name: Whole.of(mine, shapes[name]) for name, mine in copies.items()}
