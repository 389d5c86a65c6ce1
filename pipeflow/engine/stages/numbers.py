"""Numbers: what the numbers in the operators of a loss follow from, told by comparing two microbatches. Must not
contain: how the terms of a loss are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.engine.stages.samples import AmbiguousError, SampleAxis, UnprovedError
from pipeflow.engine.stages.tape import Seen, TapeNode
from pipeflow.engine.stages.terms import Reading
from pipeflow.engine.stages.values import ONE, Factor, Known, Value

LAID_OUT = ("clone", "view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "expand", "contiguous")
"""Operators that depend on how a tensor lies in memory, which is another way for a batch of one sample."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """How a scalar was computed from a microbatch: its node, and what Python read, as in Tape; `seen` in a criterion
    alone.
    """

    node: TapeNode
    read: list[tuple[float, TapeNode]]
    seen: list[Seen] = field(default_factory=list)


class Other(NamedTuple):
    """Another microbatch, with which the first is compared.

    Attributes:
        recorded: how its loss is computed.
        rows, samples: as in Reading.
        is_whole: True if it is the whole batch.
    """

    recorded: Recorded
    rows: Callable[[TapeNode], SampleAxis | None]
    samples: int
    is_whole: bool


def require_alike(mine: Reading, its: Reading, seen: Sequence[Seen], others: Sequence[Seen]) -> None:
    """Raises UnprovedError if Python branched in another way for another microbatch."""
    sizes = [(float(mine.samples), float(its.samples))]
    sizes += [(one.value, other.value) for one, other in zip(seen, others, strict=False) if one.is_size]

    def are_alike(one: float, other: float) -> bool:
        return one == other or (one != one and other != other)  # not a number

    def is_scaled(one: Any, other: Any) -> bool:
        return type(one) is int and any(one * its == other * mine for mine, its in sizes if its)

    nodes, their_nodes = ([each for each in reading.nodes if each.name not in LAID_OUT] for reading in (mine, its))
    is_same = len(nodes) == len(their_nodes) and all(map(are_alike, mine.others, its.others))
    for one, other in zip(nodes, their_nodes, strict=False):
        is_same = is_same and (one.func, one.leaf, one.dtype) == (other.func, other.leaf, other.dtype)
        if is_same and one not in mine.told:
            if one.value is not None and one.value.numel() == 1:
                is_same = are_equal(one.value, other.value)
            pairs = list(zip(one.numbers(), other.numbers(), strict=False))
            is_same = is_same and all(are_alike(*pair) or is_scaled(*pair) for pair in pairs)
    if not is_same:
        raise UnprovedError("it is computed in another way for other values of the batch, on which Python may branch")


def resolved(index: int, mine: Reading, its: Reading, *, is_whole: bool) -> Factor:
    """What a number is: the same, in proportion to the number of samples, or read from the batch. If it was compared
    with that of the whole batch, any of these that fits is right.
    """
    number, other = mine.numbers[index], its.numbers[index]
    samples, others = mine.samples, its.samples
    found = []
    if isclose(number, other):
        found.append(Factor("constant", (abs(number),)) if number else ONE)
    elif isclose(number * others, other * samples):
        found.append(Factor("entries", (abs(number),)))
    elif isclose(number * samples, other * others):
        found.append(Factor("over", (ONE, Factor("entries", (1 / abs(number),)))))
    for (value, node), (its_value, its_node) in zip(mine.read, its.read, strict=False):
        for sign in (1, -1):
            if not (is_whole and found) and _is(number, value, sign) and _is(other, its_value, sign):
                with suppress(UnprovedError):  # it is no count, such as the greatest label
                    factor = _known((mine, node), (its, its_node))
                    found.append(factor if sign > 0 else Factor("over", (ONE, factor)))
    distinct = list(dict.fromkeys(found))[: 1 if is_whole else None]
    if not distinct:
        raise UnprovedError(f"it is not known how the number {number:g} follows from the batch")
    if index in mine.fixed and distinct[0].kind not in ("constant", "one"):
        raise UnprovedError(f"the number {number:g}, which depends on the batch, is not a factor of it")
    if index in mine.fixed and len(distinct) > 1:
        raise AmbiguousError(f"it is not known whether the number {number:g} was read from the batch")
    return distinct[0] if len(distinct) == 1 else Factor("either", tuple(distinct))


def _is(number: float, value: float, sign: int) -> bool:
    """Returns True if a number has the size of a value, or of its inverse."""
    return isclose(abs(number), abs(value)) if sign > 0 else bool(value) and isclose(abs(number), 1 / abs(value))


def _known(*given: tuple[Reading, TapeNode]) -> Factor:
    """A number that was read from a tensor of a microbatch as a factor; the second is that of another microbatch."""
    found: list[tuple[Reading, Value]] = []
    for reading, node in given:
        like = found[0][0].asked if found else None
        own = Reading(reading.rows, reading.samples, [], reading.rules, reading.linear, like)
        found.append((own, own.value(node)))
    (mine, value), (its, _) = found
    same = [isclose(one, other) for one, other in zip(mine.numbers, its.numbers, strict=True)]
    if not isinstance(value, Known) or not all(same):
        raise UnprovedError("it uses a number that was read from the batch")
    factor: Factor = with_numbers(value.factor, [Factor("constant", (abs(each),)) for each in mine.numbers])
    return factor


def are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Returns True for two tensors with the same shape and entries."""
    return one is not None and other is not None and one.shape == other.shape and bool(torch.equal(one, other))


def with_numbers(factor: Any, numbers: Sequence[Factor]) -> Any:
    """A factor with what its numbers are."""
    if isinstance(factor, tuple):
        return tuple(with_numbers(each, numbers) for each in factor)
    if not isinstance(factor, Factor):
        return factor
    if factor.kind == "number":
        return numbers[factor.args[0]]
    return Factor(factor.kind, with_numbers(factor.args, numbers))
