"""Scaling: a loss whose terms are divided by different numbers. Its terms are found among the scalars that the forward
computes, and each is multiplied by a number of its own. Must not contain: these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node as GraphNode
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.tape import Tape, TapeNode
from pipeflow.engine.stages.terms import Reading
from pipeflow.engine.stages.values import TermSum, UnprovedError, terms_of
from pipeflow.engine.torch_private.trees import tree_map


class Scalar(NamedTuple):
    """A scalar that a function of torch returned.

    Attributes:
        name: name of the function.
        value: the scalar, detached.
        edge: where its gradient is computed: a GradientEdge, or the scalar itself if it was computed again.
        node: its node, in a trace.
    """

    name: str
    value: Tensor
    edge: Any
    node: TapeNode | None


class Scalars(TorchFunctionMode):
    """Records the scalars that require a gradient, in the order in which functions return them."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self.found: list[Scalar] = []

    def on(self, tape: Tape | None) -> Self:
        """Records the nodes on a tape, too."""
        self.tape = tape
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and not output.dim() and output.requires_grad and output.grad_fn is not None:
            node = None if self.tape is None else self.tape.of(output)
            name = getattr(func, "__name__", str(func))
            self.found.append(Scalar(name, output.detach().clone(), get_gradient_edge(output), node))
        return output

    def valued(self, values: Mapping[TapeNode, Tensor]) -> list[Scalar]:
        """The scalars, those that were computed again with their new values."""
        return [
            scalar if its is None else Scalar(scalar.name, its.detach(), its, scalar.node)
            for scalar in self.found
            for its in (None if scalar.node is None else values.get(scalar.node),)
        ]


@dataclass(frozen=True, slots=True)
class TermPlace:
    """Where a term is: its index, and the scalar that has it, counted from the last one, with its function's name."""

    term: int
    back: int
    name: str


def places(
    reading: Reading, loss: TapeNode, scalars: Sequence[Scalar], alike: Callable[[Sequence[int]], bool]
) -> tuple[list[TermPlace], int | None]:
    """The scalars that have the terms of a loss, each with terms that are `alike`, and the index of a term that is no
    such scalar, such as a constant, or None.

    Raises UnprovedError if one function of torch adds up terms that are not alike, or if a term has no gradient of its
    own.
    """
    at = {scalar.node: index - len(scalars) for index, scalar in enumerate(scalars)}
    found: list[TermPlace] = []
    rest: list[int] = []
    pending: list[tuple[TapeNode | None, int]] = [(loss, 0)]
    while pending:
        node, first = pending.pop()
        if node is None or (node not in at and not isinstance(reading.value(node), TermSum)):
            rest.append(first)
            continue
        if node in at and alike(range(first, first + len(terms_of(reading.value(node))))):
            found.append(TermPlace(first, at[node], scalars[at[node]].name))
            continue
        for part in _parts(reading, node):
            pending.append((part, first))
            first += 1 if part is None else len(terms_of(reading.value(part)))
    if not alike(rest):
        raise UnprovedError("constants in it are divided by different numbers")
    _require_gradients(loss, scalars, found)
    return found, rest[0] if rest else None


def _require_gradients(loss: TapeNode, scalars: Sequence[Scalar], found: Sequence[TermPlace]) -> None:
    """Raises UnprovedError unless the gradient of the loss reaches each place, and none through another one, and flows
    to no parameter past the places.
    """
    ends = [scalar.edge.node for scalar in scalars if scalar.node is loss][-1:]
    places = {scalars[place.back].edge.node for place in found}
    is_used_once = len(places) == len(found) and not any(places & _reached([place]) - {place} for place in places)
    if not places or not places <= _reached(ends) or not is_used_once:
        raise UnprovedError("a part of it has a divisor of its own, and is detached or used twice")
    if any(hasattr(node, "variable") for node in _reached(ends, until=places)):
        raise UnprovedError(
            "a parameter is added to it, or multiplies a sum of terms that have different divisors: write "
            "`parameter * 1` where it is added, and multiply each term alone"
        )


def _reached(starts: Sequence[GraphNode], until: Collection[GraphNode] = ()) -> set[GraphNode]:
    """The nodes of autograd's graph that are reached from some, with these, and not through `until`."""
    reached, pending = set(starts), [each for each in starts if each not in until]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in reached:
                reached.add(node)
                pending += [node] if node not in until else []
    return reached


def _parts(reading: Reading, node: TapeNode) -> list[TapeNode | None]:
    """What the terms of a scalar are the terms of, in their order; None for a number."""
    match node.name:
        case "add" | "sub" | "rsub":
            given = (node.argument("self"), node.argument("other"))
            return [
                each if isinstance(each, TapeNode) else None for each in given if isinstance(each, TapeNode) or each
            ]
        case "stack" | "cat":
            return list(node.argument("tensors"))
        case "mul" | "div" | "neg" | "view" | "_to_copy" | "sum" | "mean" | "clone" | "alias" | "squeeze" | "unsqueeze":
            return [each for each in node.nodes() if isinstance(reading.value(each), TermSum)]
    raise UnprovedError(f"{node.name} adds up terms that are divided by different numbers")


class Scaling:
    """Multiplies the terms of the losses of a batch's microbatches.

    Args:
        places: where the terms are.
        ratios: for each microbatch, the number by which each term is multiplied.
        rest: index of a term that is no scalar with a gradient, such as a constant; None if there is none.
    """

    def __init__(self, places: Sequence[TermPlace], ratios: Sequence[Sequence[float]], rest: int | None) -> None:
        self._places, self._ratios, self._rest = places, ratios, rest
        self.scalars = Scalars()

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A stage's call, whose scalars are recorded."""

        @wraps(call)
        def recording(*arguments: Any, **keywords: Any) -> Any:
            self.scalars = Scalars()
            with torch.enable_grad(), self.scalars:
                return call(*arguments, **keywords)

        return recording

    def computed(self, criterion: Callable[..., Tensor], output: object, labels: object) -> Tensor:
        """The loss of an output. Its scalars are recorded; an evaluation, too, computes their gradients."""
        given = output if torch.is_grad_enabled() else tree_map(_with_gradient, output)
        with torch.enable_grad(), self.scalars:
            return criterion(given, labels)

    def scaled(
        self, loss: Tensor, microbatch: int, scalars: Sequence[Scalar] | None = None
    ) -> tuple[Tensor, list[Any], list[Tensor]]:
        """The loss with its terms multiplied, where its gradients start, and these gradients. `scalars` are those of a
        loss that was computed again; by default those of this forward.

        Raises UsageError if the forward computed the loss in another way than in the trace.
        """
        if scalars is None:
            scalars = self.scalars.found
            if any(len(scalars) < -place.back or scalars[place.back].name != place.name for place in self._places):
                raise UsageError(
                    "the terms of the loss are divided by different numbers, and it was computed in another way than "
                    'when it was traced: pass weigh=, or a criterion and loss_over="batch"'
                )
        terms, ratios = [scalars[place.back] for place in self._places], self._ratios[microbatch]
        found = torch.autograd.grad(loss, [term.edge for term in terms], retain_graph=True, allow_unused=True)
        slopes = [  # how much the loss grows with each term, unless it does not depend on it
            (term, slope, ratios[place.term])
            for place, term, slope in zip(self._places, terms, found, strict=True)
            if slope is not None
        ]
        rest = loss.detach() - sum(slope * term.value for term, slope, _ in slopes)
        total = rest * ratios[self._rest] if self._rest is not None else torch.zeros_like(rest)
        used = [each for each in slopes if each[-1]]
        for term, slope, ratio in used:
            total = total + slope * term.value * ratio
        return total, [term.edge for term, *_ in used], [slope * ratio for _, slope, ratio in used]


def _with_gradient(leaf: object) -> object:
    """A tensor that requires a gradient, if it can; other objects as they are."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.requires_grad:
        return leaf.detach().requires_grad_()
    return leaf
