"""What `make test` leaves to `make test-all`. Of a matrix it has fewer rows: those in which any two values of different
columns that may stand together do so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

LEFT_OUT = Path(__file__).parent / "left_out.txt"
"""Tests, or cases of tests, that `python -m tests.planted choose` found to add little."""
Row = tuple[Any, ...]
TRIES = 60
"""Rows among which the best is taken, where more would do."""


def covering(
    *columns: Sequence[Any], possible: Callable[..., bool] = lambda *_: True, singly: Collection[int] = ()
) -> list[Row]:
    """Rows of the matrix that have every pair of values of two columns that a possible row has; few, not the fewest.
    Always the same ones, in the order of the matrix; rather those with the first values of the columns. The values of
    the columns `singly` are each in a row, in pairs with others only by chance.
    """
    every = [row for row in product(*map(_numbered, columns)) if possible(*(value for _, value in row))]
    pairs = [set(_pairs([place for place, _ in row], singly)) for row in every]
    missing, random, found = set[Any]().union(*pairs), Random(0), set[int]()
    while missing:
        pair = min(missing)
        having = [number for number, its in enumerate(pairs) if pair in its]
        tried = sorted(random.sample(having, min(TRIES, len(having))))
        best = max(tried, key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        found.add(best)
    return [tuple(value for _, value in every[number]) for number in sorted(found)]


def _pairs(places: Sequence[int], singly: Collection[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Of (column, place in it)."""
    entries = list(enumerate(places))
    yield from ((entry,) for entry in entries)
    yield from combinations([entry for entry in entries if entry[0] not in singly], 2)


def _numbered(column: Sequence[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(column))


def thinned(*columns: Sequence[Any], possible: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """The possible rows of the matrix as parameters of a test, of which those outside of a covering are exhaustive."""
    return some_rows([row for row in product(*columns) if possible(*row)], covering(*columns, possible=possible))


def halved(*columns: Sequence[Any], kept: Collection[Row]) -> list[Any]:
    """Half of the matrix as parameters of a test: the rows whose places in the columns have an even sum, and those that
    are `kept`, of which the others are exhaustive. So all values that any columns but one can have together are there.
    """
    numbered = ([*zip(*row, strict=True)] for row in product(*map(_numbered, columns)))
    return some_rows([row for places, row in numbered if sum(places) % 2 == 0 or row in kept], kept)


def some_rows(every: Iterable[Row], kept: Collection[Row]) -> list[Any]:
    """Rows as parameters of a test, of which those that are not kept are exhaustive."""
    return [pytest.param(*row, marks=[] if row in kept else [pytest.mark.exhaustive]) for row in every]


def some(every: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Values as parameters of a test, of which those that are not kept are exhaustive."""
    return [pytest.param(value, marks=[] if value in kept else [pytest.mark.exhaustive]) for value in every]


def spaced(number: int, total: int) -> set[int]:
    """The places of `number` cases among `total`, evenly spaced from the first one on; all if there are fewer."""
    return {place * total // number for place in range(number)}
