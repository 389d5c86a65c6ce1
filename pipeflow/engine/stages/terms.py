"""Terms: of which sums over samples a loss is made, and what divides each of them, read from a Tape. Must not contain:
what operators that are not pointwise make of samples, which is in `term_rules`, and the values of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isclose, isfinite, prod
from typing import Any

import torch

from pipeflow.engine.stages.tape import TapeNode
from pipeflow.engine.stages.term_rules import RULES
from pipeflow.engine.stages.values import (
    ONE,
    Factor,
    Known,
    Rows,
    Same,
    SampleAxis,
    Term,
    TermSum,
    UnprovedError,
    Value,
    Values,
    aligned,
    mixes,
    over,
    terms_of,
    times,
    viewed,
    without,
)


@dataclass
class Reading:
    """Reads terms from nodes.

    Args:
        rows: function that returns the axis of a tensor that no operator made, and None for one that is the same for
            all microbatches. Raises UnprovedError if that is not known.
        samples: number of samples in the microbatch.
        read: numbers that Python read from known tensors.
        like: `asked` of another microbatch, whose numbers are to be compared.
        is_careful: True if Python may have branched on values of the batch, so that any number may depend on it.

    Attributes:
        numbers: the numbers in the operators that may depend on the number of samples or on a number that was read.
        fixed: indices of the numbers that must not.
        exponents: those of them that are exponents, which hardly ever do.
        constants: tensors of several entries without an operator, whose values must not depend on the batch.
        asked: of each number in the operators, whether it is one of `numbers`.
        others: the numbers that are not asked.
        nodes: all that was read, in order.
        told: the nodes whose numbers are among `numbers` or `others`.
    """

    rows: Callable[[TapeNode], SampleAxis | None]
    samples: int
    read: list[tuple[float, TapeNode]]
    like: list[bool] | None = None
    is_careful: bool = False
    numbers: list[float] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    exponents: set[int] = field(default_factory=set)
    constants: list[TapeNode] = field(default_factory=list)
    asked: list[bool] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    nodes: list[TapeNode] = field(default_factory=list)
    told: set[TapeNode] = field(default_factory=set)
    _values: dict[TapeNode, Value] = field(default_factory=dict)
    _places: dict[tuple[Any, ...], int] = field(default_factory=dict)  # of what is counted, since numbers may be equal

    def terms(self, node: TapeNode) -> tuple[Term, ...]:
        """The terms of a scalar. Raises UnprovedError if it is no sum of such terms."""
        value = self.value(node)
        if isinstance(value, Rows):
            raise UnprovedError("it has an entry for each sample")
        return terms_of(value)

    def value(self, node: TapeNode) -> Value:
        """What a tensor is."""
        pending = [node]
        while pending:  # no recursion, which deep graphs would exhaust
            last = pending[-1]
            missing = [] if last in self._values else [each for each in self._needs(last) if each not in self._values]
            if not missing:
                pending.pop()
                if last not in self._values:
                    self.nodes.append(last)
                    self._values[last] = self._read(last)
            pending += missing
        return self._values[node]

    def _needs(self, node: TapeNode) -> list[TapeNode]:
        return [] if node.func is None else node.nodes()

    def _read(self, node: TapeNode) -> Value:
        if node.func is None:
            return self._source(node)
        name = node.name
        values = {each: self._values[each] for each in node.nodes()}
        if name in _UNIFORM:
            if name == "fill" and not all(isinstance(self._values[each], Same) for each in node.nodes()[1:]):
                raise UnprovedError("a tensor is filled with a number that depends on the batch")
            return Same()
        if name == "slice" and node.shape != node.nodes()[0].shape and isinstance(values[node.nodes()[0]], Same):
            return Same(varies=True)  # as many as there are samples, perhaps
        if name in _VARYING or all(isinstance(each, Same) for each in values.values()):
            return Same(
                name in _VARYING | _UNEVEN or any(isinstance(each, Same) and each.varies for each in values.values())
            )
        if name in ("lift_fresh", "alias", "detach", "clone", "_to_copy", "copy"):
            return self._copied(node, values)
        if node.is_known and all(isinstance(each, Same | Known) for each in values.values()):
            numbers = tuple(self.number(each) for each in node.numbers())
            return Known(Factor("known", (node, tuple(self._factor(each) for each in node.nodes()), numbers)))
        if rule := RULES.get(name):
            return rule(self, node, values)
        if name in _VIEWS:
            return self._viewed(node, values)
        if name in _LOSSES:
            return self._reduced_by_name(node, self._pointwise(node, values, of := node.nodes()[0]), of)
        if torch.Tag.pointwise in node.func.tags or name in _POINTWISE:
            return self._pointwise(node, values)
        raise UnprovedError(f"the operator {name} is not known")

    def _source(self, node: TapeNode) -> Value:
        """A tensor that no operator made."""
        is_constant = node.leaf is None and not node.is_source and not node.is_sealed
        if is_constant and node.value is None:
            raise UnprovedError("a tensor was written to through a view of it")
        if is_constant and node.shape.numel() > 1:
            self.constants.append(node)
        axis = None if is_constant or node.is_source else self.rows(node)
        return Same(varies=node.shape.numel() > 1 and not node.is_source) if axis is None else Rows(axis)

    def _factor(self, node: TapeNode) -> Factor:
        value = self._values[node]
        if isinstance(value, Known):
            return value.factor
        assert isinstance(value, Same)
        return Factor("same", (node,))

    def _copied(self, node: TapeNode, values: Values) -> Value:
        source = node.nodes()[-1 if node.name == "copy" else 0]
        value = values[source]
        if isinstance(value, Rows) and node.shape != source.shape:
            return Rows(aligned([(value.axis, source)], node.shape, node.name), value.factor)
        if isinstance(value, Known) and not _keeps_values(source.dtype, node.dtype):
            if node.name == "copy":
                raise UnprovedError("a number that depends on labels is rounded")
            return Known(Factor("known", (node, (value.factor,), ())))
        return value

    def _viewed(self, node: TapeNode, values: Values) -> Value:
        [of, *others] = node.nodes()
        value = values[of]
        if others or not isinstance(value, Rows):
            if isinstance(value, TermSum) and not others:
                return value
            raise UnprovedError(f"{node.name} of a sum over samples")
        return Rows(viewed(value.axis, node, of), value.factor)

    def _pointwise(self, node: TapeNode, values: Values, like: TapeNode | None = None) -> Value:
        """An operator whose entries, which may be reduced then, are made of the same entries of its arguments. They
        have the shape of `like`; None for that of the result.
        """
        shape = node.shape if like is None else like.shape
        if not any(isinstance(each, Rows) for each in values.values()):
            values = {
                each: TermSum(terms_of(value)) if isinstance(value, Same) and not each.is_known else value
                for each, value in values.items()
            }
        if any(isinstance(each, TermSum) for each in values.values()):
            return self._linear(node, values)
        rows = [(value, each) for each, value in values.items() if isinstance(value, Rows)]
        axis = aligned([(value.axis, each) for value, each in rows], shape, node.name)
        for each, value in values.items():
            dim = axis.dim - len(shape) + len(each.shape)
            if isinstance(value, Same) and value.varies and dim >= 0 and each.shape[dim] > 1:
                raise mixes(f"{node.name} with a constant of one entry per sample")
        factor = self._row_factor(node, values)
        if factor is None:
            count = len(self.numbers)
            self.fix([self.number(each) for each in node.numbers()])
            if node.name == "pow":
                self.exponents |= set(range(count, len(self.numbers)))
            if any(isinstance(each, Known) for each in values.values()):
                raise UnprovedError(f"{node.name} of entries of samples with a sum over samples")
            for value, _ in rows:
                self.plain(value, node)
            factor = ONE
        return Rows(axis, factor)

    def _row_factor(self, node: TapeNode, values: Values) -> Factor | None:
        """The factor of the result of an operator that multiplies; None for another one."""
        match node.name:
            case "mul" | "div":
                first, second = (self.multiplied(node.argument(each), values) for each in ("self", "other"))
                if node.argument("rounding_mode") is not None:
                    return None
                return times(first, second) if node.name == "mul" else over(first, second)
            case "neg" | "nan_to_num":
                return self.multiplied(node.argument("self"), values)
            case "masked_fill" | "where":
                names = ("self",) if node.name == "masked_fill" else ("self", "other")
                kept = [node.argument(each) for each in names]
                filled = node.argument("value") if node.name == "masked_fill" else None
                mine = [values[each] for each in kept if isinstance(each, TapeNode)]
                factors = {each.factor for each in mine if isinstance(each, Rows)}
                if len(factors) == 1 and (filled in (None, 0) and all(isinstance(each, Rows) for each in mine)):
                    return factors.pop()
            case "add" | "sub":
                mine = [values[each] for each in node.nodes()]
                factors = {each.factor for each in mine if isinstance(each, Rows)}
                if len(factors) == 1 and len(node.nodes()) == 2 and all(isinstance(each, Rows) for each in mine):
                    self.fix([self.number(node.argument("alpha", 1))])
                    return factors.pop()
        return None

    def _linear(self, node: TapeNode, values: Values) -> Value:
        """An operator on sums over samples, which must be linear in them."""
        if any(isinstance(each, Rows) for each in values.values()):
            raise UnprovedError(f"{node.name} of entries of samples with a sum over samples")
        first, other = node.argument("self"), node.argument("other") if node.name != "neg" else None

        def scaled(of: Any, by: Any, combined: Callable[[Factor, Factor], Factor]) -> TermSum:
            value, scale = values[of], self.value(by) if isinstance(by, TapeNode) else None
            if isinstance(scale, TermSum) or not isinstance(value, TermSum):
                raise UnprovedError(f"{node.name} of two sums over samples that depend on parameters")
            known = self.multiplied(by, {} if scale is None else {by: scale})
            return TermSum(tuple(Term(combined(each.factor, known), each.adds) for each in value.terms))

        match node.name:
            case "neg" | "nan_to_num":
                return values[first]
            case "mul":
                is_first = isinstance(first, TapeNode) and isinstance(self.value(first), TermSum)
                return scaled(first, other, times) if is_first else scaled(other, first, times)
            case "div" if isinstance(first, TapeNode) and node.argument("rounding_mode") is None:
                return scaled(first, other, over)
            case "add" | "sub" | "rsub":
                alpha = self.number(node.argument("alpha", 1))
                terms: list[Term] = []
                factors = (alpha, ONE) if node.name == "rsub" else (ONE, alpha)
                for each, factor in zip((first, other), factors, strict=True):
                    value = values[each] if isinstance(each, TapeNode) else Same()
                    if isinstance(each, TapeNode) or each != 0:  # a number of 0 adds no term
                        terms += [Term(times(term.factor, factor), term.adds) for term in terms_of(value)]
                return TermSum(tuple(terms))
            case "where":
                return _chosen(node, values, first, other)
        raise UnprovedError(f"{node.name} of a sum over samples is no sum over samples")

    def multiplied(self, argument: Any, values: Values) -> Factor:
        """What an argument of a product adds to the factor."""
        if not isinstance(argument, TapeNode):
            return self.number(argument)
        value = values[argument]
        if isinstance(value, Known):
            if argument.shape.numel() != 1:
                raise UnprovedError("entries of samples are multiplied by several sums over samples")
            return value.factor
        if isinstance(value, Rows):
            return value.factor
        return self.number_of(argument)

    def number(self, number: Any) -> Factor:
        """A number as a factor: ONE if it cannot depend on the number of samples, nor on a number that was read."""
        if isinstance(number, bool) or not isinstance(number, int | float):
            return ONE
        if self.like is None:
            self.asked.append(isfinite(number) if self.is_careful else self._may_depend(abs(float(number))))
        elif len(self.asked) < len(self.like):
            self.asked.append(self.like[len(self.asked)])
        else:
            raise UnprovedError("it is another one for a microbatch of another size")
        self.told |= set(self.nodes[-1:])
        if not self.asked[-1]:
            self.others.append(float(number))
            return ONE
        self.numbers.append(float(number))
        return Factor("number", (len(self.numbers) - 1,))

    def _may_depend(self, size: float) -> bool:
        if not size or not isfinite(size):
            return False
        inverse = 1 / size
        grows = any(
            isclose(each, round(each), rel_tol=1e-6) and not round(each) % self.samples
            for each in (size, inverse)
            if each > 0.5
        )
        return grows or any(each and (isclose(size, abs(each)) or isclose(inverse, abs(each))) for each, _ in self.read)

    def number_of(self, node: TapeNode) -> Factor:
        """A constant as a factor."""
        source = node
        while source.name in ("lift_fresh", "detach", "clone", "_to_copy", "alias", "expand", "view"):
            source = source.nodes()[0]
        if source.func is None and source.leaf is None and source.value is not None and source.value.numel() == 1:
            self.told.add(source)
            return self.number(float(source.value)) if not source.value.is_complex() else ONE
        return ONE

    def plain(self, value: Rows, node: TapeNode) -> Factor:
        """The factor of what an operator, which is not linear, makes of entries: ONE, since theirs must not depend on
        the batch.
        """
        pending = [value.factor]
        while pending:
            factor = pending.pop()
            if factor.kind not in ("one", "number", "times", "over"):
                raise UnprovedError(f"{node.name} of what is divided by a sum over samples")
            self.fix([factor])
            pending += factor.args if factor.kind in ("times", "over") else ()
        return ONE

    def fix(self, factors: Iterable[Factor]) -> None:
        """Requires that numbers do not depend on the batch."""
        self.fixed |= {each.args[0] for each in factors if each.kind == "number"}

    def reduced(
        self, node: TapeNode, value: Value, of: TapeNode, dims: list[int], *, is_mean: bool, keepdim: bool
    ) -> Value:
        """The sum or the mean of a tensor over some dimensions."""
        if isinstance(value, TermSum):
            return value
        assert isinstance(value, Rows)
        if value.axis.dim not in dims:
            return Rows(without(value.axis, dims, keepdim=keepdim), value.factor)
        factor = over(value.factor, self.count(value.axis, of, dims)) if is_mean else value.factor
        return self.summed(node, factor)

    def summed(self, node: TapeNode, factor: Factor) -> Value:
        """A sum over samples."""
        if node.is_known:
            return Known(times(factor, Factor("total", (node, factor))))
        return TermSum((Term(factor),))

    def count(self, axis: SampleAxis, of: TapeNode, dims: list[int]) -> Factor:
        """The number of entries of a tensor in some dimensions, but for a constant factor."""
        if not all(each.is_known for each in axis.picks):
            raise UnprovedError("the mean is over samples that the model picks")
        if axis.picks:
            return Factor("picked", axis.picks)
        return Factor(
            "entries", (prod(of.shape[dim] for dim in dims), self._places.setdefault((of, *dims), len(self._places)))
        )

    def _reduced_by_name(self, node: TapeNode, value: Value, of: TapeNode) -> Value:
        """The result of a loss of torch that reduces the entries of its argument."""
        reduction = node.argument("reduction", 1)
        if reduction == 0 or not isinstance(value, Rows):
            return value
        return self.reduced(node, value, of, list(range(len(of.shape))), is_mean=reduction == 1, keepdim=False)


def _chosen(node: TapeNode, values: Values, first: Any, other: Any) -> Value:
    """`where` on sums over samples: a term whose condition is false has the factor 0."""
    condition = node.argument("condition")
    if not isinstance(values[condition], Known | Same):
        raise UnprovedError("where chooses by a sum over samples that depends on parameters")
    given = values[condition]
    chosen = given.factor if isinstance(given, Known) else Factor("same", (condition,))
    terms = [Term(Factor("if", (chosen, each.factor)), each.adds) for each in terms_of(values[first])]
    if other.name not in ("zeros_like", "zeros", "new_zeros", "scalar_tensor"):
        terms += [Term(Factor("unless", (chosen, each.factor)), each.adds) for each in terms_of(values[other])]
    return TermSum(tuple(terms))


def _keeps_values(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Returns True if numbers are the same in another dtype, such as those that count samples."""
    is_rounded = dtype in (torch.float16, torch.bfloat16) and not source.is_floating_point and source != torch.bool
    return torch.promote_types(source, dtype) == dtype and not is_rounded


_UNIFORM = {
    *("zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "ones_like", "full_like", "empty_like", "fill"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "rand_like", "randn_like", "bernoulli", "zero"),
}
_VARYING = {"arange", "eye", "linspace", "randperm", "rand", "randn", "randint", "tril_indices", "triu_indices"}
_UNEVEN = {
    *("cumsum", "cumprod", "logcumsumexp", "tril", "triu"),
    *("constant_pad_nd", "cat", "stack", "index_put", "scatter"),
}
"""Operators that make entries that are not alike of entries that are."""
_POINTWISE = {
    *("masked_fill", "where", "native_dropout", "isin", "threshold", "glu", "one_hot", "gelu", "silu"),
    "log_sigmoid_forward",
}
_VIEWS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "flatten", "t", "transpose"),
    *("permute", "expand", "select", "unbind", "slice", "split", "split_with_sizes", "flip", "roll", "constant_pad_nd"),
}
_LOSSES = {
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("soft_margin_loss", "kl_div", "l1_loss", "poisson_nll_loss", "hinge_embedding_loss"),
}
