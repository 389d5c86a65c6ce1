"""Rows: the outputs of a module over all microbatches, replicas and tensor ranks, put together from the sketches of
their rows. Which rank had which sample does not matter: a row of one run is looked for among all rows of the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pipeflow.checking.files import Array, Event
from pipeflow.checking.limits import TINY

_CHUNK = 512  # rows compared with all others at once

Called = tuple[int, Event]  # a rank, and the event of an output
Made = tuple[Array, tuple[int, ...], int]  # rows, the ranks that made them, and the index of the call


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
    found: list[Made] = [(event["rows"], (rank,), event["call"]) for rank, event in whole]
    if parts:
        added = _added(parts, tail)
        if added is None:
            return None
        found += added
    if not found or any(
        len(rows) != event["shape"][0] for (rows, _, _), (_, event) in zip(found, whole, strict=False) if event["shape"]
    ):
        return None
    return _rows(found, tail)


def _rows(made: Sequence[Made], tail: tuple[int, ...]) -> OutputRows:
    ranks = [own for rows, own, _ in made for _ in rows]
    calls = [call for rows, _, call in made for _ in rows]
    return OutputRows(np.concatenate([rows for rows, _, _ in made]), ranks, calls, tail)


def _added(parts: Sequence[Called], tail: tuple[int, ...]) -> list[Made] | None:
    """The rows of parts that are known to lie side by side."""
    by_call: defaultdict[int, defaultdict[tuple[int, ...], list[Called]]] = defaultdict(lambda: defaultdict(list))
    for rank, event in parts:
        if not event.get("known") or event.get("partial") or len(tail_of(event)) != len(tail):
            return None
        by_call[event["call"]][tuple(event["begin"])].append((rank, event))
    found = []
    for call, by_place in by_call.items():
        many = {len(each) for each in by_place.values()}
        volume = sum(prod(tail_of(each[0][1])) for each in by_place.values())
        if len(many) > 1 or volume != prod(tail):
            return None
        for group in zip(*by_place.values(), strict=True):
            rows = [event["rows"] for _, event in group]
            if len({each.shape for each in rows}) > 1:
                return None
            found.append((np.sum(rows, axis=0), tuple(rank for rank, _ in group), call))
    return found


class Unmatched(NamedTuple):
    """What has no like: indices of rows of each run, and the largest distance to the nearest one, relative to a row."""

    reference: list[int]
    candidate: list[int]
    error: float


def unmatched(reference: OutputRows, candidate: OutputRows, allowed: float) -> Unmatched:
    """The rows of each run that no row of the other equals, up to `allowed` of the size of a row."""
    size = max(reference.size, TINY)
    nearest_in_reference = _nearest(candidate.values, reference.values) / size
    nearest_in_candidate = _nearest(reference.values, candidate.values) / size
    mine = [index for index, apart in enumerate(nearest_in_candidate) if not apart <= allowed]
    theirs = [index for index, apart in enumerate(nearest_in_reference) if not apart <= allowed]
    return Unmatched(mine, theirs, float(max(nearest_in_reference.max(), nearest_in_candidate.max())))


def _nearest(rows: Array, others: Array) -> Array:
    """The distance of each row to the nearest of the others."""
    found = []
    for start in range(0, len(rows), _CHUNK):
        apart = rows[start : start + _CHUNK, None, :8] - others[None, :, :8]
        found.append(np.sqrt(np.mean(np.square(apart), axis=2).min(axis=1)))
    return np.concatenate(found)


def by_group(events: Sequence[Called], places: Mapping[int, Any]) -> list[list[Called]]:
    """The calls that ranks with different parts of one weight made together: ranks are taken by what they hold."""
    by_call: defaultdict[int, defaultdict[Any, list[Called]]] = defaultdict(lambda: defaultdict(list))
    for rank, event in events:
        by_call[event["call"]][places[rank]].append((rank, event))
    return [list(group) for each in by_call.values() for group in zip(*each.values(), strict=False)]


def summed(groups: Sequence[Sequence[Called]], tail: tuple[int, ...]) -> OutputRows | None:
    """The rows of groups of calls whose outputs add up, as those of layers that are split along their inputs do. Norms
    are not known.
    """
    found = []
    for group in groups:
        rows = [event["rows"] for _, event in group]
        if len({each.shape for each in rows}) > 1 or len(rows) < 2:
            return None
        found.append((np.sum(rows, axis=0), tuple(rank for rank, _ in group), group[0][1]["call"]))
    return _rows(found, tail) if found else None


def numel(events: Sequence[Called]) -> int:
    """How many numbers the calls returned together."""
    return sum(prod(event["shape"]) for _, event in events)


def square(events: Sequence[Called]) -> float:
    """The squared norm of all that the calls returned."""
    return float(sum(event["rows"][:, 8].sum() for _, event in events))
