"""Elements: which rows and columns of a tensor or an output differ, if its values were recorded whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from pipeflow.checking.files import Array
from pipeflow.checking.rows import Called, joined, tail_of, unmatched
from pipeflow.checking.weighing import listed

FAR = 6.0  # times the root mean square of what is allowed: an element that is wrong
NAMES = ("rows", "columns")


def where(mine: Array, theirs: Array, allowed: float) -> tuple[str, bool]:
    """Which elements differ, in words, and whether they are the right values at other places.

    Args:
        mine, theirs: values of the reference and of the candidate, of the same shape.
        allowed: norm of the difference that rounding explains.
    """
    limit = FAR * allowed / max(1, mine.size) ** 0.5
    wrong = ~(np.abs(theirs - mine) <= limit)
    if moved := _moved(mine, theirs, limit):
        return moved, True
    parts = [*_parts(wrong, [_name(dim) for dim in range(wrong.ndim)])]
    share = f"{wrong.sum()} of {wrong.size} elements are wrong"
    return f"{share}: {' and '.join(parts)}" if parts else share, False


def where_in_rows(mine: Sequence[Called], theirs: Sequence[Called], allowed: float) -> str | None:
    """Where the rows of an output differ, in words; None if a part of them was not recorded whole, or none differs.

    Args:
        mine, theirs: calls of a module in the reference and in the candidate.
        allowed: what rounding explains, relative to a row.
    """
    if not all("values" in event for _, event in (*mine, *theirs)):
        return None
    tail = tail_of(mine[0][1])
    rows, others = joined(mine, tail), joined(theirs, tail)
    if rows is None or others is None or not tail:
        return None
    apart = unmatched(rows, others, allowed)
    ours, values = (np.concatenate([event["values"] for _, event in each]) for each in (mine, theirs))
    if not apart.candidate or not apart.reference:
        return None
    sources, limit = ours[apart.reference], FAR * allowed * rows.size / prod(tail) ** 0.5
    wrong = np.zeros(tail, dtype=bool)
    for row in values[apart.candidate]:
        off = np.abs(sources - row)
        wrong |= ~(off[off.reshape(len(off), -1).sum(axis=1).argmin()] <= limit)
    between = ["positions"] if len(tail) == 2 else [f"entries along dimension {dim}" for dim in range(1, len(tail))]
    parts = " and ".join(_parts(wrong, [*between, "columns"]))
    share = f"{len(apart.candidate)} of {len(values)} rows of the output are wrong"
    return f"{share}, in {parts}" if parts else share


def _parts(wrong: Array, names: Sequence[str]) -> Iterator[str]:
    """The indices along each dimension that have a wrong element, if not all have."""
    for dim, size in enumerate(wrong.shape):
        indices = np.flatnonzero(wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != dim)))
        if 0 < len(indices) < size:
            yield f"{names[dim]} {listed(indices.tolist())} of {size}"


def _moved(mine: Array, theirs: Array, limit: float) -> str | None:
    """Rows, or columns and so on, that have the values of others of the reference."""
    for dim in range(mine.ndim):
        ours, others = (np.moveaxis(each, dim, 0).reshape(mine.shape[dim], -1) for each in (mine, theirs))
        wrong = np.flatnonzero(~(np.abs(others - ours) <= limit).all(axis=1))
        sources = [_source(ours, others[index], limit) for index in wrong]
        if len(wrong) > 1 and ours.shape[1] > 1 and None not in sources:
            return f"{_name(dim)} {listed(wrong.tolist())} have the values of {_name(dim)} {_told(sources)}"
    return None


def _source(ours: Array, row: Array, limit: float) -> int | None:
    near = int(np.abs(ours - row).sum(axis=1).argmin())
    return near if bool((np.abs(ours[near] - row) <= limit).all()) else None


def _told(sources: Sequence[int | None]) -> str:
    return listed([index for index in sources if index is not None])


def _name(dim: int) -> str:
    return NAMES[dim] if dim < len(NAMES) else f"entries along dimension {dim}"
