"""Factors: how much each microbatch costs, as a multiple of the costs of its stages. There is one sequence of factors
for all stages, or a table with a row per stage. Must not contain: what they multiply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeflow.core.errors import UsageError

Row = tuple[float, ...]
"""The factors of a stage, per microbatch."""
Factors = Row | tuple[Row, ...]
"""Per microbatch, its factor on all stages; or per stage, such a row. Empty: all microbatches are alike."""
FactorsLike = Sequence[float] | Sequence[Sequence[float]] | Mapping[int, Sequence[float]]
"""What is taken as factors: also a mapping from a stage to its row. Stages that it leaves out have the factor 1."""

NAME = "microbatch_factors"


def factors_of(given: Any, stages: int) -> Factors:
    """The factors in their one form: a table whose rows are equal is a sequence. Raises UsageError for another number
    of rows than stages, and for rows of different lengths.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{NAME} must be a list of numbers, or one such list per stage, got {given!r}")
    rows = _filled(given, stages) if isinstance(given, Mapping) else tuple(given)
    if not any(map(_is_row, rows)):
        return rows
    if len(rows) != stages:
        raise UsageError(
            f"{NAME} has {len(rows)} rows, but there are costs of {stages} stages: give one row per stage, or one "
            "list for all stages"
        )
    for stage, row in enumerate(rows):
        if not _is_row(row) or len(row) != len(rows[0]):
            has = f"{len(row)} factors" if _is_row(row) else f"{row!r}"
            raise UsageError(f"{NAME}: stage {stage} has {has}, but each stage needs one factor per microbatch")
    table: tuple[Row, ...] = tuple(map(tuple, rows))
    return table[0] if len({*table}) == 1 else table


def _is_row(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _filled(given: Mapping[Any, Any], stages: int) -> tuple[Any, ...]:
    """The rows of a mapping from stages. Raises UsageError for a stage that does not exist, and for what is no row."""
    if unknown := [stage for stage in given if stage not in range(stages)]:
        raise UsageError(f"{NAME} has a row for {unknown[0]!r}, but stages are numbered from 0 to {stages - 1}")
    if bad := [stage for stage, row in given.items() if not _is_row(row)]:
        raise UsageError(f"{NAME} of stage {bad[0]} must be a list of numbers, got {given[bad[0]]!r}")
    ones = (1.0,) * max(map(len, given.values()), default=0)
    return tuple(given.get(stage, ones) for stage in range(stages))


def is_table(factors: Sequence[Any]) -> bool:
    """Whether there is a row per stage."""
    return bool(factors) and _is_row(factors[0])


def table_of(factors: Sequence[Any], stages: int) -> tuple[Row, ...]:
    """Per stage, the factors of its microbatches. Empty if all microbatches are alike."""
    if not factors:
        return ()
    return tuple(map(tuple, factors)) if is_table(factors) else (tuple(factors),) * stages


def put_in_order(factors: Sequence[Any], order: Sequence[int]) -> Factors:
    """The factors if the microbatch at each place is that of `order`."""
    if is_table(factors):
        return tuple(tuple(row[microbatch] for microbatch in order) for row in factors)
    return tuple(factors[microbatch] for microbatch in order)


def each_factor(factors: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Every factor, with where it stands in words."""
    rows = factors if is_table(factors) else (factors,)
    for stage, row in enumerate(rows):
        where = f"stage {stage}, microbatch" if is_table(factors) else "microbatch"
        for microbatch, factor in enumerate(row):
            yield f"{where} {microbatch}", factor


def require_factors(factors: Sequence[Any], microbatches: int) -> None:
    """Raises UsageError unless there is a factor for each microbatch, or none at all."""
    numbers = len(factors[0] if is_table(factors) else factors)
    if numbers not in (0, microbatches):
        raise UsageError(
            f"{NAME} has {numbers} numbers, but the schedule has {microbatches} microbatches: give one per microbatch, "
            "or none if all are alike"
        )
