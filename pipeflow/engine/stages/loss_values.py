"""Values of a loss that is computed again from its tape, with made-up outputs of blocks and made-up parameters: do the
parts of a batch add up to the batch as they were read to? Must not contain: what a loss is divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeflow.engine.stages.tape import BATCH_NORMS, Leaves, TapeNode, again, upstream
from pipeflow.engine.stages.values import SampleAxis
from pipeflow.engine.torch_private.modes import FakeTensor

MOST = 2**25  # entries of the tensors of all operators: they are computed in float64 on the host
CLOSE, ROUNDING = 1e-6, 1e-12


class UncheckedError(Exception):
    """A loss cannot be computed again from its tape; the message says why."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The loss of some samples as it was traced: its node, their leaves, and the axis of what no operator made."""

    loss: TapeNode
    leaves: Leaves
    rows: Callable[[TapeNode], SampleAxis | None]


Computed = dict[TapeNode, Any]


def adds_up(parts: Sequence[Traced], whole: Traced, scaled: Callable[[int, Computed], Tensor]) -> bool:
    """Whether the losses of some parts, and their gradients, add up to those of the whole.

    Args:
        parts: the parts of the whole, in the order of their samples.
        whole: all samples.
        scaled: returns for a part, by its index and the values of its nodes, what it adds to the whole: a scalar with a
            graph.

    Raises UncheckedError if they cannot be computed.
    """
    given, inputs = _made_up([*parts, whole])
    values = [_computed(part, mine) for part, mine in zip((*parts, whole), given, strict=True)]
    expected = values[-1][whole.loss]
    found = sum(scaled(index, each) for index, each in enumerate(values[:-1]))
    if not isinstance(found, Tensor) or not bool(expected.isfinite()):
        raise UncheckedError("the loss of made-up outputs is not finite")
    both = [_gradients(each, inputs) for each in (expected, found)]
    most = max((float(each.abs().max()) for each in both[0]), default=0.0)
    return _are_close(expected.detach(), found.detach(), 0.0) and all(map(_are_close, *both, [most] * len(inputs)))


def _are_close(one: Tensor, other: Tensor, most: float) -> bool:
    """False for a number that is not finite, too. A gradient may be the rounding of the greatest one, `most`."""
    return bool((one - other).abs().max() <= CLOSE * one.abs().max() + ROUNDING * most)


def _gradients(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(each) for each in inputs]
    found = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(each) if its is None else its for each, its in zip(inputs, found, strict=True)]


def _made_up(parts: Sequence[Traced]) -> tuple[list[Computed], list[Tensor]]:
    """Values for what no operator of each part made, of which the last part is the whole; and the tensors of which they
    are views.
    """
    if sum(node.shape.numel() for node in upstream(parts[-1].loss)) > MOST:
        raise UncheckedError("it has too many outputs")
    columns = [[node for node in upstream(part.loss) if _is_open(node)] for part in parts]
    if len({len(column) for column in columns}) != 1:
        raise UncheckedError("the whole is computed in another way")
    found: list[Computed] = [{} for _ in parts]
    inputs: list[Tensor] = []
    random = torch.Generator().manual_seed(len(columns[0]))
    for nodes in zip(*columns, strict=True):
        if not nodes[-1].dtype.is_floating_point or not nodes[-1].shape.numel() or any(node.is_known for node in nodes):
            raise UncheckedError("the values of a tensor are not known")
        made = torch.rand(nodes[-1].shape, dtype=torch.float64, generator=random).mul_(0.8).add_(0.1).requires_grad_()
        inputs.append(made)
        for each, value, node in zip(found, [*_parts_of(made, nodes, parts), made], nodes, strict=True):
            each[node] = value
    return found, inputs


def _parts_of(made: Tensor, nodes: Sequence[TapeNode], parts: Sequence[Traced]) -> Sequence[Tensor]:
    """The values of all nodes but the last one."""
    axes = [None if node.is_source else part.rows(node) for node, part in zip(nodes, parts, strict=True)]
    axis, own = axes[-1], nodes[:-1]
    if axis is None:
        given: Sequence[Tensor] = [made] * len(own)
    else:
        given = made.split([node.shape[axis.dim] if node.shape else 0 for node in own], axis.dim)
    if any(each is not None and axis is None for each in axes) or any(
        value.shape != node.shape for value, node in zip(given, own, strict=True)
    ):
        raise UncheckedError("the whole has tensors of other shapes")
    return given


def _is_open(node: TapeNode) -> bool:
    """True if no operator made it and its values are not known."""
    return node.func is None and node.leaf is None and node.value is None


def _computed(part: Traced, given: Computed) -> Computed:
    """The values of all nodes."""
    values, pending = dict(given), [part.loss]
    while pending:
        node = pending[-1]
        missing = [] if node in values or node.func is None else [each for each in node.nodes() if each not in values]
        pending += missing
        if not missing:
            pending.pop()
            if node not in values:
                values[node] = _value(node, part.leaves, values)
    return values


def _value(node: TapeNode, leaves: Leaves, values: Computed) -> Any:
    if node.func is None:
        return _wide(leaves[node.leaf] if node.leaf is not None else node.value)
    if node.name in _DROPOUT:
        given = values[node.nodes()[0]]
        return given if not node.index else torch.ones_like(given, dtype=torch.bool)
    if torch.Tag.nondeterministic_seeded in node.func.tags or node.name in BATCH_NORMS:
        raise UncheckedError(f"{node.name} is another one for each part")

    def valued(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        return values[value] if isinstance(value, TapeNode) else value

    return again(node, valued)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    found = value.detach().to("cpu", torch.float64 if value.is_floating_point() else value.dtype)
    if isinstance(found, FakeTensor):
        raise UncheckedError("the values of a tensor are not known")
    return found


_DROPOUT = ("native_dropout", "_fused_dropout")
