"""Values: what a tensor of a forward is for its loss, such as entries of samples or a sum over them; and factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeflow.engine.stages.samples import SampleAxis


@dataclass(frozen=True, slots=True)
class Factor:
    """A number that is the same for all samples of a batch, as an expression.

    Attributes:
        kind: "one"; "times" and "over" of two factors; "number" with an index among the suspicious numbers; "known" for
            an operator on factors; "some" and "each", whether a mask is true in any or in all samples; "same" for a
            constant; or a kind that adds up over microbatches: "entries" with their number, "total" of a known node
            over a factor, "picked" by a mask, or "classes", labels that count.
        args: what the kind needs.
    """

    kind: str
    args: tuple[Any, ...] = ()

    @property
    def adds(self) -> bool:
        """True if the number of a batch is the sum of those of its microbatches."""
        return self.kind in ("entries", "total", "picked", "classes")


ONE = Factor("one")


def times(one: Factor, other: Factor) -> Factor:
    """The product of two factors."""
    return other if one == ONE else one if other == ONE else Factor("times", (one, other))


def over(one: Factor, other: Factor) -> Factor:
    """The quotient of two factors."""
    return one if other == ONE else Factor("over", (one, other))


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a loss: a sum over samples times a factor or, if it does not add up, the same in each microbatch."""

    factor: Factor
    adds: bool = True


@dataclass(frozen=True, slots=True)
class Same:
    """The same for all microbatches. `varies` if its entries are not all alike, so that they could number samples."""

    varies: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Entries of which each belongs to a sample, times a factor."""

    axis: SampleAxis
    factor: Factor = ONE


@dataclass(frozen=True, slots=True)
class TermSum:
    """A sum of terms that depend on parameters."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A number, or a few, that depend on labels, masks and constants alone."""

    factor: Factor


Value = Same | Rows | TermSum | Known


def terms_of(value: Value) -> tuple[Term, ...]:
    """What a value adds to a sum."""
    if isinstance(value, TermSum):
        return value.terms
    if isinstance(value, Known):
        return (Term(value.factor, adds=False),)
    return (Term(ONE, adds=False),)
