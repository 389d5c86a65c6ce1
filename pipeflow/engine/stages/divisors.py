"""Divisors: what the terms of a loss are divided by, for a batch and for its microbatches. What its numbers
follow from is told by comparing two microbatches. Must not contain: how the terms are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isclose, isfinite
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from pipeflow.engine.stages.tape import Leaves, Recorded, Seen, TapeNode, again, replay
from pipeflow.engine.stages.terms import Reading
from pipeflow.engine.stages.values import (
    ONE,
    AmbiguousError,
    Factor,
    Known,
    SampleAxis,
    Term,
    UnprovedError,
    Value,
    changed,
    factors_in,
    over,
    times,
)

_CONSTANT = ("one", "constant", "times", "over")  # kinds of factors that are the same for all microbatches
_LAID_OUT = ("clone", "view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "expand", "contiguous")
"""Operators that depend on how a tensor lies in memory, which is another way for a batch of one sample."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The terms of a loss for microbatches of certain shapes.

    Attributes:
        terms: the terms.
        totals: the factors that add up over microbatches, in the order in which they occur.
        seen: what Python may have branched on in the microbatch, and in the whole batch.
    """

    terms: tuple[Term, ...]
    totals: tuple[Factor, ...]
    seen: tuple[Sequence[Seen], Sequence[Seen]] = field(default=((), ()), compare=False)

    def holds(self, leaves: Leaves, whole: Leaves) -> bool:
        """Returns True if Python read the same from these leaves of a microbatch and of the whole batch."""
        for seen, mine in zip(self.seen, (leaves, whole), strict=True):
            known: dict[TapeNode, Any] = {}
            if not all(each.holds(mine, known) for each in seen):
                return False
        return True

    @property
    def is_simple(self) -> bool:
        """True if all is divided by one number that adds up over microbatches and replicas."""
        factors = {_unplaced(term.factor) for term in self.terms}
        if len(factors) != 1 or not all(term.adds for term in self.terms):
            return not self.totals and not any(term.adds for term in self.terms)
        [factor] = factors
        return bool(factor.kind == "over" and factor.args[0] == ONE and factor.args[1].adds)

    @property
    def is_clear(self) -> bool:
        """True if it is known of all its numbers what they follow from."""
        return not any(each.kind == "either" for term in self.terms for each in factors_in(term.factor))

    @property
    def kinds(self) -> tuple[object, ...]:
        """The kinds of factors of its terms, but for constants."""
        return tuple(
            (term.adds, *(each.kind for each in factors_in(term.factor) if each.kind not in _CONSTANT))
            for term in self.terms
        )

    @property
    def digest(self) -> float:
        """A digest of the kinds of factors, so that ranks can compare them."""
        return float(crc32(repr(self.kinds).encode()))

    def counted(self, leaves: Leaves) -> list[Tensor]:
        """What a microbatch with these leaves adds to each of the totals."""
        known: dict[TapeNode, Any] = {}
        found: dict[Factor, Tensor] = {}
        for total in self.totals:
            found[total] = _count(total, leaves, known, found)
        return [found[total] for total in self.totals]

    def divisor(self, leaves: Leaves) -> float:
        """What a microbatch with these leaves adds to the divisor of its first term, which adds up over them."""
        divisor = self.terms[0].factor.args[1]
        if divisor.kind == "entries":
            return float(divisor.args[0])
        return float(dict(zip(self.totals, self.counted(leaves), strict=True))[divisor])

    def factors(self, totals: Sequence[Tensor], leaves: Leaves) -> list[float]:
        """The factor of each term if the totals are these."""
        at = dict(zip(self.totals, totals, strict=True))
        return [float(_value(term.factor, at, leaves, {})) for term in self.terms]


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


def form_of(
    recorded: Recorded,
    rows: Callable[[TapeNode], SampleAxis | None],
    samples: int,
    other: Callable[[], Other | None],
) -> LossTerms:
    """The terms of a scalar. `other` returns the same for a microbatch of another size, or None if there is none.

    Raises UnprovedError if it is no sum over samples, divided by what depends on labels, masks and constants alone.
    """
    is_careful = bool(recorded.seen)
    reading = Reading(rows, samples, recorded.read, is_careful=is_careful)
    terms = reading.terms(recorded.node)
    if samples > 1 and not reading.numbers and not reading.constants and not is_careful:
        return _formed(terms, [])
    second = other()
    is_plain = samples > 1 and not reading.constants and not is_careful
    if second is None and is_plain and len(reading.exponents) == len(reading.numbers):
        return _formed(terms, [ONE] * len(reading.numbers))
    if second is None:
        raise UnprovedError("it may depend on the number of samples, and the forward takes no batch of another size")
    its = Reading(second.rows, second.samples, second.recorded.read, reading.asked, is_careful)
    its_terms = its.terms(second.recorded.node)
    if len(its_terms) != len(terms) or len(its.asked) != len(reading.asked):
        raise UnprovedError("it is another one for a microbatch of another size")
    if not all(_are_equal(one.value, each.value) for one, each in zip(reading.constants, its.constants, strict=True)):
        raise UnprovedError("it uses a tensor that the forward makes from values of the batch")
    if is_careful:
        _require_alike(reading, its, recorded.seen, second.recorded.seen)
    numbers = [_resolved(index, reading, its, is_whole=second.is_whole) for index in range(len(reading.numbers))]
    return _formed(terms, numbers, (recorded.seen, second.recorded.seen))


def _formed(
    terms: Sequence[Term], numbers: Sequence[Factor], seen: tuple[Sequence[Seen], Sequence[Seen]] = ((), ())
) -> LossTerms:
    made = tuple(Term(_without_constants(_with_numbers(term.factor, numbers)), term.adds) for term in terms)
    totals = dict.fromkeys(each for term in made for each in factors_in(term.factor) if each.adds)
    return LossTerms(made, tuple(totals), seen)


def _require_alike(mine: Reading, its: Reading, seen: Sequence[Seen], others: Sequence[Seen]) -> None:
    """Raises UnprovedError if Python branched in another way for another microbatch."""
    sizes = [(float(mine.samples), float(its.samples))]
    sizes += [(one.value, other.value) for one, other in zip(seen, others, strict=False) if one.is_size]

    def are_alike(one: float, other: float) -> bool:
        return one == other or (one != one and other != other)  # not a number

    def is_scaled(one: Any, other: Any) -> bool:
        return type(one) is int and any(one * its == other * mine for mine, its in sizes if its)

    nodes, their_nodes = ([each for each in reading.nodes if each.name not in _LAID_OUT] for reading in (mine, its))
    is_same = len(nodes) == len(their_nodes) and all(map(are_alike, mine.others, its.others))
    for one, other in zip(nodes, their_nodes, strict=False):
        is_same = is_same and (one.func, one.leaf, one.dtype) == (other.func, other.leaf, other.dtype)
        if is_same and one not in mine.told:
            if one.value is not None and one.value.numel() == 1:
                is_same = _are_equal(one.value, other.value)
            pairs = list(zip(one.numbers(), other.numbers(), strict=False))
            is_same = is_same and all(are_alike(*pair) or is_scaled(*pair) for pair in pairs)
    if not is_same:
        raise UnprovedError("it is computed in another way for other values of the batch, on which Python may branch")


def _resolved(index: int, mine: Reading, its: Reading, *, is_whole: bool) -> Factor:
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
        own = Reading(reading.rows, reading.samples, [], like)
        found.append((own, own.value(node)))
    (mine, value), (its, _) = found
    same = [isclose(one, other) for one, other in zip(mine.numbers, its.numbers, strict=True)]
    if not isinstance(value, Known) or not all(same):
        raise UnprovedError("it uses a number that was read from the batch")
    return _with_numbers(value.factor, [Factor("constant", (abs(each),)) for each in mine.numbers])


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Returns True for two tensors with the same shape and entries."""
    return one is not None and other is not None and one.shape == other.shape and bool(torch.equal(one, other))


def _without_constants(factor: Factor) -> Factor:
    """A factor without its own factors that are the same for all microbatches of all replicas."""
    if factor.kind not in ("times", "over"):
        return ONE if factor.kind == "constant" else factor
    one, other = map(_without_constants, factor.args)
    return times(one, other) if factor.kind == "times" else over(one, other)


def _with_numbers(factor: Factor, numbers: Sequence[Factor]) -> Factor:
    """A factor with what its numbers are."""
    found: Factor = changed(factor, lambda each: numbers[each.args[0]] if each.kind == "number" else each)
    return found


def _unplaced(factor: Factor) -> Factor:
    """A factor in which numbers of entries are equal if the numbers are."""
    found: Factor = changed(factor, lambda each: Factor("entries", each.args[:1]) if each.kind == "entries" else each)
    return found


def _count(total: Factor, leaves: Leaves, known: dict[TapeNode, Any], found: dict[Factor, Tensor]) -> Tensor:
    match total.kind:
        case "entries":
            return torch.tensor(float(total.args[0]), dtype=torch.float64, device="cpu")
        case "picked":
            [mask] = total.args
            return _wide(replay(mask, leaves, known).count_nonzero())
        case "classes":
            target, weight, ignored = total.args
            labels = replay(target, leaves, known)
            counted = labels[labels != ignored]
            if weight is None:
                return torch.tensor(float(counted.numel()), dtype=torch.float64, device="cpu")
            weights: Tensor = _wide(replay(weight, leaves, known))
            return weights[counted].sum()
    node, factor = total.args
    value: Tensor = replay(node, leaves, known)
    if not value.any() and again(node, lambda each: _sizes(each, leaves, known)).any():
        raise UnprovedError("what it is divided by adds up to 0 in a microbatch, but is not 0 for each sample")
    return (_wide(value) / _value(factor, found, leaves, known)).nan_to_num(0.0, 0.0, 0.0)


def _sizes(value: Any, leaves: Leaves, known: dict[TapeNode, Any]) -> Any:
    """The absolute values of an argument of an operator."""
    return _wide(replay(value, leaves, known)).abs() if isinstance(value, TapeNode) else value


def _wide(value: Tensor) -> Tensor:
    return value.to("cpu", torch.float64)


def _value(factor: Factor, totals: dict[Factor, Tensor], leaves: Leaves, known: dict[TapeNode, Any]) -> Tensor:
    """The value of a factor if its totals are these."""
    if factor in totals:
        return totals[factor]

    def of(each: Factor) -> Tensor:
        return _value(each, totals, leaves, known)

    match factor.kind:
        case "either":
            [first, *others] = [of(each) for each in factor.args]
            if not all(torch.isclose(first, each) for each in others):
                raise AmbiguousError(f"the number {float(first):g} was read from the batch, or follows from its shape")
            return first
        case "constant":
            return torch.tensor(factor.args[0], dtype=torch.float64, device="cpu")
        case "some":
            return of(factor.args[0]) > 0
        case "each":
            return of(factor.args[0]) == of(factor.args[1])
        case "one":
            return torch.ones((), dtype=torch.float64, device="cpu")
        case "times":
            return _wide(of(factor.args[0])) * _wide(of(factor.args[1]))
        case "over":
            return _wide(of(factor.args[0])) / _wide(of(factor.args[1]))
        case "if":
            return torch.where(of(factor.args[0]).bool(), _wide(of(factor.args[1])), 0.0)
        case "unless":
            return torch.where(of(factor.args[0]).bool(), 0.0, _wide(of(factor.args[1])))
        case "same":
            constant: Tensor = replay(factor.args[0], leaves, known)
            return constant
    node, factors, numbers = factor.args
    given, signed = iter([of(each) for each in factors]), iter(numbers)

    def valued(value: Any) -> Any:
        if isinstance(value, TapeNode):
            return next(given).to(value.dtype)
        if type(value) not in (int, float):
            return value
        number = next(signed, ONE)
        return value if number.kind in ("one", "constant") else math.copysign(float(of(number)), value)

    try:
        found: Tensor = again(node, valued)
    except Exception as error:  # whatever torch raises
        raise UnprovedError(f"{node.name} of sums over samples cannot be computed ({error})") from error
    return found


def ratios(
    forms: Sequence[LossTerms],
    leaves: Sequence[Leaves],
    whole: Callable[[list[Tensor]], list[Tensor]],
    sizes: Sequence[int],
) -> list[list[float]]:
    """For each microbatch, what each term's part in it must be multiplied by, so that the parts add up to the loss of
    the batch.

    Args:
        forms: the form of each microbatch.
        leaves: the leaves of each microbatch.
        whole: function that adds the totals of the other replicas to these totals.
        sizes: number of samples of each microbatch.

    Raises UnprovedError if the microbatches have different terms.
    """
    counted = [form.counted(each) for form, each in zip(forms, leaves, strict=True)]
    if len({len(each) for each in counted}) > 1 or len({len(form.terms) for form in forms}) > 1:
        raise UnprovedError("it is another one for some microbatches")
    own = [torch.stack(column).sum(0) for column in zip(*counted, strict=True)]
    *totals, samples = whole([*own, torch.tensor(float(sum(sizes)), dtype=torch.float64, device="cpu")])
    found = []
    for form, mine, its, size in zip(forms, counted, leaves, sizes, strict=True):
        of_batch, of_part = form.factors(totals, its), form.factors(mine, its)
        _require_empty(form, mine, of_part)
        shares = [1.0 if term.adds else size / float(samples) for term in form.terms]
        found.append(
            [_ratio(*each) * share for each, share in zip(zip(of_batch, of_part, strict=True), shares, strict=True)]
        )
    return found


def _require_empty(form: LossTerms, counted: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Raises UnprovedError if a term is divided by 0 in a microbatch in which all that it counts is not 0."""
    empty = {total for total, each in zip(form.totals, counted, strict=True) if not each.any()}
    for term, factor in zip(form.terms, factors, strict=True):
        if not isfinite(factor) and empty.isdisjoint(factors_in(term.factor)):
            raise UnprovedError("a term of it is divided by 0 in a microbatch that has what it counts")


def _ratio(whole: float, part: float) -> float:
    """The quotient; 0 for a part of nothing. Raises UnprovedError for a term that is left out of a microbatch, but not
    of the batch.
    """
    if not part and whole:
        raise UnprovedError("a term of it, which is not 0 for the batch, is multiplied by 0 in a microbatch")
    return whole / part if part and isfinite(part) else 0.0


def alike(row: Sequence[float]) -> bool:
    """Returns True if the ratios of the terms of a microbatch are the same."""
    return all(abs(each - row[0]) <= 1e-12 * abs(row[0]) for each in row)  # 0 is for what need not be finite
