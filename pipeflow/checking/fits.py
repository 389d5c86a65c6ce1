"""Fits: what recorded numbers of the candidate are in terms of the reference's: a multiple, or the same values but for
some elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import NamedTuple

import numpy as np

from pipeflow.checking.files import Array
from pipeflow.checking.limits import FAR, NEAR, SAME_ROWS, TINY
from pipeflow.checking.runs import Called, joined, tail_of, unmatched

DTYPES = "casts, autocast, and the dtype in which sums are kept"  # what to look at where an error is that of a dtype


def listed(indices: Sequence[int]) -> str:
    """Indices in words.

    >>> listed([2, 3, 4]), listed([1, 5])
    ('2 to 4', '1, 5')
    """
    if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]} to {indices[-1]}"
    return ", ".join(map(str, indices[:8])) + (" ..." if len(indices) > 8 else "")


class Fit(NamedTuple):
    """`values` is nearly `factor` times `others`; `error` is what is left, relative to `values`."""

    factor: float
    error: float


def fit(others: Array, values: Array) -> Fit:
    """The factor by which sketches, of any shape, are a multiple of others."""
    size = float(np.sum(others * others))
    factor = float(np.sum(others * values)) / size if size else 0.0
    left = float(np.sqrt(np.sum(np.square(values - factor * others))))
    return Fit(factor, left / max(float(np.sqrt(np.sum(np.square(values)))), TINY))


def named(factor: float, sizes: Mapping[str, float]) -> str | None:
    """The count, or product or ratio of two, that a factor equals, or one over it; None if there is none."""
    for inverse, words in ((False, "the number of"), (True, "one over the number of")):
        same = [name for name, size in sizes.items() if abs((factor * size if inverse else factor / size) - 1.0) < NEAR]
        if same:
            return f"{words} {' or of '.join(same)}"
    for name, size in _candidates(sizes):
        for value, words in ((size, f"the number of {name}"), (1.0 / size, f"one over the number of {name}")):
            if abs(factor / value - 1.0) < NEAR:
                return words
    for (name, size), (other, more) in permutations(sizes.items(), 2):
        if abs(factor * more / size - 1.0) < SAME_ROWS:
            return f"the number of {name} over that of {other}"
    return None


def _candidates(sizes: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    listed = [*sizes.items()]
    for index, (name, size) in enumerate(listed):
        yield from ((f"{name} times that of {other}", size * more) for other, more in listed[index:] if "(" not in name)


def root_named(factor: float, sizes: Mapping[str, float]) -> str | None:
    """As `named`, for the square of the factor: what a norm that counts something several times is off by."""
    found = named(factor * factor, sizes)
    return None if found is None else f"the root of {found}"


def spread_of(values: Sequence[float]) -> float:
    """The largest relative distance of numbers from their mean."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / max(abs(mean), TINY)


def as_times(factor: float) -> str:
    """A factor in words.

    >>> as_times(4.0), as_times(0.25)
    ('4 times', '0.25 times')
    """
    return f"{factor:.4g} times"


NAMES = ("rows", "columns")


def wrong_elements(mine: Array, theirs: Array, allowed: float) -> tuple[str, bool]:
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


def wrong_entries(mine: Sequence[Called], theirs: Sequence[Called], allowed: float) -> str | None:
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
        found = (_source(ours, others[index], limit) for index in wrong)
        sources = [index for index in found if index is not None]
        if len(wrong) > 1 and ours.shape[1] > 1 and len(sources) == len(wrong):
            return f"{_name(dim)} {listed(wrong.tolist())} have the values of {_name(dim)} {listed(sources)}"
    return None


def _source(ours: Array, row: Array, limit: float) -> int | None:
    near = int(np.abs(ours - row).sum(axis=1).argmin())
    return near if bool((np.abs(ours[near] - row) <= limit).all()) else None


def _name(dim: int) -> str:
    return NAMES[dim] if dim < len(NAMES) else f"entries along dimension {dim}"
