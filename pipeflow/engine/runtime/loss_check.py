"""Check of how a loss was read: some samples of a batch are divided into two parts, whose losses, and their gradients,
must add up to those of all of them. They are computed again from the tape, with made-up outputs of blocks and made-up
parameters. Must not contain: how a loss is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.engine.runtime.loss_parts import LossPart, axis_of, resized
from pipeflow.engine.stages.scaling import Scalars
from pipeflow.engine.stages.tape import BATCH_NORMS, Leaves, TapeNode, again, upstream
from pipeflow.engine.stages.values import UnprovedError
from pipeflow.engine.torch_private.modes import FakeTensor

if TYPE_CHECKING:
    from pipeflow.engine.runtime.weighing import Divisors

MOST = 2**25  # entries of the tensors of all operators: they are computed in float64 on the host
CLOSE, ROUNDING = 1e-6, 1e-12
FIRST, SECOND = 3, 2  # most samples of the two parts


class UncheckedError(Exception):
    """A loss cannot be computed again from its tape; the message says why."""


class _Traced(NamedTuple):
    """The loss of some samples as it was traced: its node, their leaves, and the samples."""

    loss: TapeNode
    leaves: Leaves
    part: LossPart


_Computed = dict[TapeNode, Any]


def is_contradicted(divisors: Divisors, parts: Sequence[LossPart], outputs: Sequence[object]) -> bool:
    """True if the losses of two parts of some samples, or their gradients, do not add up to those of all, though they
    should. False if that cannot be tried. Raises UnprovedError if it is not known what the parts are divided by.
    """
    for pair in dict.fromkeys(((0, min(1, len(parts) - 1)), (max(0, len(parts) - 2), len(parts) - 1))):
        try:
            if not _adds_up(divisors, parts[0], outputs[0], *_two_of(*(parts[index] for index in pair))):
                return True
        except (UncheckedError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            continue  # it cannot be tried
    return False


def _two_of(first: LossPart, second: LossPart) -> tuple[LossPart, LossPart]:
    """Some samples of two microbatches, or of one that has them all."""
    if first.pairs or (first is second and first.samples < 2):
        raise UncheckedError("its samples cannot be divided")
    if first is second:
        count = min(FIRST, first.samples - 1)
        return first.some(0, count), first.some(count, min(SECOND, first.samples - count))
    return first.some(0, min(FIRST, first.samples)), second.some(0, min(SECOND, second.samples))


def _adds_up(divisors: Divisors, like: LossPart, output: object, first: LossPart, second: LossPart) -> bool:
    """Whether two parts add up. `output` is what the last stage returns for the microbatch `like`."""
    parts = (first, second, first.larger(second.samples, second))
    given = [resized(output, like, each) for each in parts]
    scalars = [Scalars() for _ in parts]
    try:
        read = [divisors.recorded(*each) for each in zip(parts, given, scalars, strict=True)]
    except UnprovedError as error:  # the forward may take microbatches of one size alone
        raise UncheckedError(str(error)) from error
    leaves = divisors.on_host(parts)
    weights = divisors.weights_of(parts[:2], given[:2], leaves[:2], 1)
    traced = [_Traced(each.node, its, part) for each, its, part in zip(read, leaves, parts, strict=True)]
    made, inputs = _made_up(traced)
    values = [_computed(part, mine) for part, mine in zip(traced, made, strict=True)]
    *losses, expected = (its[each.loss] for its, each in zip(values, traced, strict=True))
    if not bool(expected.isfinite()):
        raise UncheckedError("the loss of made-up outputs is not finite")
    whole = _gradients([expected], [torch.ones_like(expected)], inputs)
    found, added = torch.zeros_like(expected), [torch.zeros_like(each) for each in inputs]
    for index, (loss, weight) in enumerate(zip(losses, weights.parts, strict=True)):
        total, starts, slopes = loss.detach() * weight, [loss], [torch.full_like(loss, weight)]
        if weights.scaling is not None:
            total, starts, slopes = weights.scaling.scaled(loss, index, scalars[index].valued(values[index]))
        elif not weight:  # its gradient may be infinite
            total, starts, slopes = torch.zeros_like(loss), [], []
        found = found + total
        added = [one + other for one, other in zip(added, _gradients(starts, slopes, inputs), strict=True)]
    most = max((float(each.abs().max()) for each in whole), default=0.0)
    return _are_close(expected.detach(), found.detach(), 0.0) and all(
        _are_close(one, other, most) for one, other in zip(whole, added, strict=True)
    )


def _are_close(one: Tensor, other: Tensor, most: float) -> bool:
    """False for a number that is not finite, too. A gradient may be the rounding of the greatest one, `most`."""
    return bool((one - other).abs().max() <= CLOSE * one.abs().max() + ROUNDING * most)


def _gradients(starts: Sequence[Any], slopes: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of the inputs if those of some tensors with a graph are the slopes."""
    pairs = [(start, slope) for start, slope in zip(starts, slopes, strict=True) if start.requires_grad]
    if not pairs:
        return [torch.zeros_like(each) for each in inputs]
    starts, slopes = zip(*pairs, strict=True)
    return torch.autograd.grad(starts, inputs, slopes, materialize_grads=True, retain_graph=True)


def _made_up(parts: Sequence[_Traced]) -> tuple[list[_Computed], list[Tensor]]:
    """Values for what no operator of each part made, of which the last part is the whole; and the tensors of which they
    are views.
    """
    if sum(node.shape.numel() for node in upstream(parts[-1].loss)) > MOST:
        raise UncheckedError("it has too many outputs")
    columns = [[node for node in upstream(part.loss) if _is_open(node)] for part in parts]
    if len({len(column) for column in columns}) != 1:
        raise UncheckedError("the whole is computed in another way")
    found: list[_Computed] = [{} for _ in parts]
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


def _parts_of(made: Tensor, nodes: Sequence[TapeNode], parts: Sequence[_Traced]) -> Sequence[Tensor]:
    """The values of all nodes but the last one."""
    axes = [None if node.is_source else axis_of(of.part, node) for node, of in zip(nodes, parts, strict=True)]
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


def _computed(part: _Traced, given: _Computed) -> _Computed:
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


def _value(node: TapeNode, leaves: Leaves, values: _Computed) -> Any:
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
