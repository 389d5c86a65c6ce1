"""Divisors: what the terms of a loss are divided by, for a batch and for its microbatches. Must not contain: how a loss
is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from pipeflow.engine.stages.numbers import Other, Recorded, are_equal, require_alike, resolved, with_numbers
from pipeflow.engine.stages.samples import AmbiguousError, SampleAxis, UnprovedError
from pipeflow.engine.stages.tape import Leaves, Seen, TapeNode, again, replay
from pipeflow.engine.stages.term_rules import RULES, linear
from pipeflow.engine.stages.terms import Reading
from pipeflow.engine.stages.values import ONE, Factor, Term, over, times

CONSTANT = ("one", "constant", "times", "over")  # kinds of factors that are the same for all microbatches


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
        return not any(kind == "either" for term in self.terms for kind in _kinds(term.factor))

    @property
    def kinds(self) -> tuple[object, ...]:
        """The kinds of factors of its terms, but for constants."""
        return tuple(
            (term.adds, *(kind for kind in _kinds(term.factor) if kind not in CONSTANT)) for term in self.terms
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
    reading = Reading(rows, samples, recorded.read, RULES, linear, is_careful=is_careful)
    terms = reading.terms(recorded.node)
    if samples > 1 and not reading.numbers and not reading.constants and not is_careful:
        return _formed(terms, [])
    second = other()
    is_plain = samples > 1 and not reading.constants and not is_careful
    if second is None and is_plain and len(reading.exponents) == len(reading.numbers):
        return _formed(terms, [ONE] * len(reading.numbers))
    if second is None:
        raise UnprovedError("it may depend on the number of samples, and the forward takes no batch of another size")
    its = Reading(second.rows, second.samples, second.recorded.read, RULES, linear, reading.asked, is_careful)
    its_terms = its.terms(second.recorded.node)
    if len(its_terms) != len(terms) or len(its.asked) != len(reading.asked):
        raise UnprovedError("it is another one for a microbatch of another size")
    if not all(are_equal(one.value, each.value) for one, each in zip(reading.constants, its.constants, strict=True)):
        raise UnprovedError("it uses a tensor that the forward makes from values of the batch")
    if is_careful:
        require_alike(reading, its, recorded.seen, second.recorded.seen)
    numbers = [resolved(index, reading, its, is_whole=second.is_whole) for index in range(len(reading.numbers))]
    return _formed(terms, numbers, (recorded.seen, second.recorded.seen))


def _formed(
    terms: Sequence[Term], numbers: Sequence[Factor], seen: tuple[Sequence[Seen], Sequence[Seen]] = ((), ())
) -> LossTerms:
    made = tuple(Term(_without_constants(with_numbers(term.factor, numbers)), term.adds) for term in terms)
    totals = dict.fromkeys(total for term in made for total in _totals(term.factor))
    return LossTerms(made, tuple(totals), seen)


def _without_constants(factor: Factor) -> Factor:
    """A factor without its own factors that are the same for all microbatches of all replicas."""
    if factor.kind not in ("times", "over"):
        return ONE if factor.kind == "constant" else factor
    one, other = map(_without_constants, factor.args)
    return times(one, other) if factor.kind == "times" else over(one, other)


def _unplaced(factor: Any) -> Any:
    """A factor in which numbers of entries are equal if the numbers are."""
    if isinstance(factor, tuple):
        return tuple(map(_unplaced, factor))
    if not isinstance(factor, Factor):
        return factor
    return Factor(factor.kind, factor.args[:1] if factor.kind == "entries" else _unplaced(factor.args))


def _totals(factor: Any) -> Iterator[Factor]:
    """The totals in a factor, those on which others depend first."""
    if isinstance(factor, tuple):
        for each in factor:
            yield from _totals(each)
    elif isinstance(factor, Factor):
        yield from _totals(factor.args)
        if factor.adds:
            yield factor


def _kinds(factor: Any) -> Iterator[str]:
    if isinstance(factor, tuple):
        for each in factor:
            yield from _kinds(each)
    elif isinstance(factor, Factor):
        yield factor.kind
        yield from _kinds(factor.args)


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
        if not isfinite(factor) and empty.isdisjoint(_totals(term.factor)):
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
