"""Reductions: how a module's loss is made of the losses of its samples, found in the operators of its forward. Must not
contain: which labels count, which is in `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Mean(NamedTuple):
    """A mean over so many entries or, if there is a `target`, over its entries that are not `ignored`, each counted by
    the `weight` of its class.
    """

    entries: int
    target: Tensor | None = None
    ignored: int = 0
    weight: Tensor | None = None

    @property
    def divisor(self) -> float:
        """The number that a sum of losses is divided by."""
        if self.target is None:
            return float(self.entries)
        kept = self.target[self.target != self.ignored]
        return float(len(kept) if self.weight is None else self.weight[kept].sum())


class Sum(NamedTuple):
    """A sum of so many entries times a number, which may depend on the number of samples, divided by a number that
    depends on the values of the batch.
    """

    entries: int
    factor: float = 1.0
    divisor: float | None = None


class Constant(NamedTuple):
    """A number that does not depend on the batch, such as the norm of a weight."""


Term = Mean | Sum | Constant
Terms = tuple[Term, ...] | None
"""The terms whose sum is a loss; None if it is no such sum."""


@dataclass(slots=True, eq=False)
class OperatorNode:
    """The result of an operator.

    Attributes:
        name: name of the operator; empty for tensors that no operator made.
        arguments: its arguments, by name; tensors as Parts.
        numel: number of entries of the result.
        depends: True if the result depends on the batch.
        value: the result if that is a number that is known; else None.
        is_pointwise: True if each entry of the result is made of the same entry of the arguments.
    """

    name: str
    arguments: dict[str, Any]
    numel: int
    depends: bool
    value: float | None = None
    is_pointwise: bool = False


class Operand(NamedTuple):
    """A tensor as an argument: what made its memory, its shape, whether it is a mask, and its values if known."""

    node: OperatorNode
    shape: torch.Size
    is_mask: bool
    known: Tensor | None

    @property
    def is_whole(self) -> bool:
        """True if it is all of that memory."""
        return self.shape.numel() == self.node.numel


@dataclass
class Reductions:
    """Notes the operators of a forward, by the memory of their results.

    Args:
        key: function that gives a number for the memory of a tensor.
        values: function that returns True if the values of a tensor are known.

    Attributes:
        targets: the means over targets, whatever became of them.
        read: numbers that the forward read from tensors of the batch.
    """

    key: Callable[[Tensor], int]
    values: Callable[[Tensor], bool]
    targets: list[Mean] = field(default_factory=list)
    read: set[float] = field(default_factory=set)
    _nodes: dict[int, OperatorNode] = field(default_factory=dict)
    _given: set[int] = field(default_factory=set)

    def give(self, batch: Iterable[object]) -> None:
        """Tells which tensors are those of the batch."""
        self._given.update(self.key(each) for each in batch if isinstance(each, Tensor))

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Records one operator, its arguments and its output."""
        first = output[0] if isinstance(output, tuple | list) and output else output  # losses come first
        name = func.overloadpacket.__name__
        if not isinstance(first, Tensor):
            if isinstance(first, int | float) and isinstance(args[0], Tensor) and self._part(args[0]).node.depends:
                self.read.add(float(first))
            return
        key = self.key(first)
        is_written = name.endswith("_") and bool(args) and isinstance(args[0], Tensor)
        if key in map(self.key, _tensors(args)) and not is_written:
            return  # a view, of the same memory
        schema = func._schema.arguments
        given = {each.name: each.default_value for each in schema}  # torch leaves out arguments that have these values
        given |= {each.name: value for each, value in zip(schema, args, strict=False)} | kwargs
        parts = {name: self._argument(each) for name, each in given.items()}
        depends = any(part.node.depends for part in _parts(parts.values()))
        known = first.numel() == 1 and not first.is_complex() and type(first) is Tensor and self.values(first)
        value = float(first) if known and not isinstance(first, FakeTensor) else None
        is_pointwise = torch.Tag.pointwise in func.tags or name in _SAME_PLACES
        self._nodes[key] = node = OperatorNode(
            name.removesuffix("_"), parts, first.numel(), depends, value, is_pointwise
        )
        if node.name in _COUNTED:
            self.targets += [term for term in _counted(parts) or () if isinstance(term, Mean)]

    def terms(self, loss: Tensor | None) -> Terms:
        """The terms that the loss is a sum of; None for no loss."""
        return None if loss is None else _terms(self._part(loss))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._part(value)
        return [self._argument(each) for each in value] if isinstance(value, tuple | list) else value

    def _part(self, tensor: Tensor) -> Operand:
        key = self.key(tensor)
        node = self._nodes.get(key)
        if node is None:
            value = float(tensor) if tensor.numel() == 1 and type(tensor) is Tensor and self.values(tensor) else None
            node = OperatorNode("", {}, tensor.numel(), key in self._given, value)
        known = tensor if not isinstance(tensor, FakeTensor) and self.values(tensor) else None
        return Operand(node, tensor.shape, tensor.dtype in (torch.bool, torch.uint8), known)


def _terms(part: Any) -> Terms:
    """The terms of a scalar, or of a tensor of several scalars that are to be added up."""
    number = part if not isinstance(part, Operand) else None if part.node.depends else part.node.value
    if number is not None or not part.node.depends:
        return () if number == 0 else (Constant(),)
    if not part.is_whole:
        return None
    node, arguments = part.node, part.node.arguments
    first, other = arguments.get("self"), arguments.get("other")
    match node.name:
        case "neg" | "clone" | "_to_copy" | "detach" | "view" | "_unsafe_view" | "nan_to_num":
            return _terms(first)
        case name if name in _COUNTED:
            return _counted(arguments)
        case "mean" | "sum":
            return _reduced(first, is_mean=node.name == "mean")
        case "add" | "sub":
            return _both(_terms(first), _scaled(_terms(other), abs(float(arguments["alpha"]))))
        case "rsub":
            return _both(_scaled(_terms(first), abs(float(arguments["alpha"]))), _terms(other))
        case "mul":
            return _times(first, other)
        case "div":
            return _over(first, other)
        case "stack" | "cat":
            return reduce(_both, (_terms(each) if each.shape.numel() == 1 else None for each in arguments["tensors"]))
        case _ if arguments.get("reduction") in (1, 2) and node.numel == 1:
            return _reduced(first, is_mean=arguments["reduction"] == 1)
    return None


def _counted(arguments: dict[str, Any]) -> Terms:
    if arguments["reduction"] != 1:
        return (Sum(arguments["target"].shape.numel()),) if arguments["reduction"] == 2 else None
    target, weight = arguments["target"], arguments["weight"]
    if target.known is None or _is_picked(arguments["self"]) or (weight is not None and weight.known is None):
        return None
    known = target.known
    return (Mean(known.numel(), known, arguments["ignore_index"], None if weight is None else weight.known),)


def _reduced(part: Operand, *, is_mean: bool) -> Terms:
    """The terms of the mean or the sum of a tensor's entries."""
    node = part.node
    scalars = node.arguments["tensors"] if node.name in ("stack", "cat") else []
    if not part.shape or (scalars and all(each.shape.numel() == 1 for each in scalars)):
        return _terms(part)
    if not is_mean:
        return (Sum(part.shape.numel()),)
    return None if _is_picked(part) else (Mean(part.shape.numel()),)


def _times(first: Any, other: Any) -> Terms:
    for part, factor in ((first, other), (other, first)):
        number = _number(factor)
        if number is not None or not _depends(factor):
            return _scaled(_terms(part), 1.0 if number is None else number)
    return None


def _over(first: Any, other: Any) -> Terms:
    found, number = _terms(first), _number(other)
    if not _depends(other):
        return None if number == 0 else _scaled(found, 1.0 if number is None else 1 / number)
    value = other.node.value
    if found is None or value is None:
        return None
    sums = [term for term in found if isinstance(term, Sum) and term.divisor is None]
    return tuple(Sum(term.entries, term.factor, value) for term in sums) if len(sums) == len(found) else None


_COUNTED = ("nll_loss_forward", "nll_loss2d_forward")
_SAME_PLACES = {"view", "_unsafe_view", "clone", "_to_copy", "_log_softmax", "_softmax", "nll_loss_forward"}
"""Operators whose results have the entries of their argument, in the same order."""


def _both(one: Terms, other: Terms) -> Terms:
    return None if one is None or other is None else (*one, *other)


def _scaled(terms: Terms, factor: float) -> Terms:
    if terms is None:
        return None
    return tuple(
        Sum(term.entries, term.factor * factor, term.divisor) if isinstance(term, Sum) else term for term in terms
    )


def _depends(value: Any) -> bool:
    return isinstance(value, Operand) and value.node.depends


def _number(value: Any) -> float | None:
    """A number that does not depend on the values of the batch."""
    if isinstance(value, Operand):
        return None if value.node.depends else value.node.value
    return abs(float(value)) if isinstance(value, int | float) else None


def _is_picked(part: Operand) -> bool:
    """Returns True if the entries of a tensor were picked out by a mask, so that their number depends on values."""
    pending, seen = [part], set[int]()
    while pending:
        found = pending.pop()
        node = found.node
        if id(node) in seen or not found.is_whole:
            continue
        seen.add(id(node))
        masks = [each for each in _parts([node.arguments.get("indices")]) if each.is_mask]
        if node.name in ("masked_select", "nonzero") or (node.name == "index" and masks):
            return True
        if node.is_pointwise or not node.name:
            pending += [each for each in _parts(node.arguments.values()) if each.shape.numel() == node.numel]
    return False


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        found += _tensors(value) if isinstance(value, tuple | list) else [value] if isinstance(value, Tensor) else []
    return found


def _parts(values: Iterable[Any]) -> list[Operand]:
    found = []
    for value in values:
        if isinstance(value, Operand):
            found.append(value)
        elif isinstance(value, list):
            found += _parts(value)
    return found
