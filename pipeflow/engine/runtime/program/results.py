"""Results: what the last stage takes from a batch, the loss that it computes from its outputs, the gradients with which
the backwards of a batch start, and the outputs themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.protocol import Channel, Transport
from pipeflow.engine.runtime.head_logits import in_memory, sources, without_memory
from pipeflow.engine.runtime.microbatch import Divided, merge
from pipeflow.engine.runtime.program.operations import Doing, Operation, run
from pipeflow.engine.runtime.program.slots import Buffers, Slot, flatten, snapshot
from pipeflow.engine.runtime.program.wires import ActivationWire, Expectations, starts_of, tags_of
from pipeflow.engine.stages.criterion import own_loss
from pipeflow.engine.stages.scaling import Scaling
from pipeflow.engine.torch_private.tensors import foreach_mul
from pipeflow.engine.torch_private.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten


class Weights(NamedTuple):
    """The weights of a batch's microbatches.

    Attributes:
        parts: what the loss of each microbatch is multiplied by.
        whole: the weight of the batch among those of other replicas and in a mean over batches.
        scaling: multiplies the terms of a loss whose terms are divided by different numbers; None for another loss.
        counted: a digest of what `whole` counts, such as samples or labels; 0 if that needs no comparison.
    """

    parts: list[float]
    whole: float
    scaling: Scaling | None = None
    counted: float = 0.0


class Results:
    """The criterion, labels and weights of a step for the last stage, and, for each microbatch, its loss (a scalar
    tensor) and, if kept, its output. If microbatches are cut into slices, each slice counts as one.
    """

    def __init__(self, microbatches: int, slices: int = 1) -> None:
        self.microbatches, self.slices = microbatches, slices
        self.clear()

    def clear(self) -> None:
        """Drops the batch, losses and outputs of the last step."""
        self.criterion: Callable[..., Tensor] | None = None
        self.labels: list[object] = []
        self.weights = Weights([], 0.0)  # before they are known, and on ranks that compute no loss
        self.settle: Callable[[object, int], None] | None = None  # finds the weights once there is an output
        self.whole: WholeLoss | None = None  # if the loss is that of the whole batch
        self.starts: dict[int, list[Tensor]] = {}  # gradients of terms with different weights, by microbatch
        self.gradient_scale: float | Tensor = 1.0  # factor of the loss's gradient
        self.keep_outputs: bool | Callable[[Any], object] = False
        self.sizes: list[int] = []  # of the microbatches, if outputs must have them along dim 0
        self.wanted: Sequence[int] | None = None  # the microbatches whose outputs are returned; None for all
        self.losses: list[Tensor | None] = [None] * self.microbatches
        self.zeros: dict[int, list[Tensor]] = {}  # gradients of the outputs of microbatches without weight
        self.outputs: list[object] = [None] * self.microbatches

    def take(self, microbatch: int, output: object, *, training: bool) -> list[GradientEdge]:
        """Computes the loss of a microbatch from the last stage's output. Returns the edges at which its backward
        starts.
        """
        edges = [] if self.criterion is None else self._computed(self.criterion, microbatch, output, training)
        if keep := self.keep_outputs:
            output = tree_map(in_memory, output)
            self.outputs[microbatch] = snapshot(keep(output) if callable(keep) else output)
        return edges

    def _computed(
        self, criterion: Callable[..., Tensor], microbatch: int, output: object, training: bool
    ) -> list[GradientEdge]:
        if self.whole is not None:
            edges, loss = self.whole.add(criterion, microbatch, output, training=training)
            if loss is not None:
                self.losses[microbatch] = loss
            return edges
        labels = self.labels[microbatch]
        if self.settle is not None:
            try:
                self.settle(tree_map(without_memory, output), microbatch)
            except UsageError:
                criterion(output, labels)  # raises its own error, if it has one
                raise
        if (scaling := self.weights.scaling) is not None:  # the backward starts at the terms of the loss
            of_terms = scaling.computed(criterion, output, labels)
            self.losses[microbatch], edges, starts = scaling.scaled(of_terms, microbatch)
            if training:
                self.starts[microbatch] = starts
            return edges
        loss = criterion(output, labels)
        self.losses[microbatch] = loss.detach()
        if not training or not loss.requires_grad:
            return []
        if self.weights.parts[microbatch]:
            return [get_gradient_edge(loss)]
        # without weight it starts at the output: the loss's gradient may be infinite, as of a mean over nothing
        others = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf is not loss]
        wanted = [each for other in others for each in sources(other) if each.requires_grad]
        self.zeros[microbatch] = [other.new_zeros(()).expand(other.shape) for other in wanted]
        return [get_gradient_edge(each) for each in wanted]

    def gradients(self, microbatch: int) -> list[Tensor]:
        """The gradients with which a backward starts: the weight of the microbatch's loss in the batch's mean loss;
        zeros for its output if it has no weight.
        """
        if self.whole is not None:
            return self.whole.gradients(microbatch, self.gradient_scale)
        loss, weight = self.losses[microbatch], self.weights.parts[microbatch]
        assert loss is not None
        if self.weights.scaling is not None:
            return [_times(each, weight * self.gradient_scale) for each in self.starts[microbatch]]
        if not weight:
            return self.zeros.get(microbatch, [])
        factor = weight * self.gradient_scale
        return [_times(torch.ones_like(loss), factor) if isinstance(factor, Tensor) else torch.full_like(loss, factor)]

    def loss(self) -> Tensor | None:
        """The batch's mean loss, a scalar tensor, summed in microbatch order under any schedule; or None."""
        parts = self.parts()
        return torch.stack(list(parts.values())).sum() if parts else None

    def computed(self) -> dict[int, Tensor]:
        """The losses that this rank computed, by microbatch."""
        return {microbatch: loss for microbatch, loss in enumerate(self.losses) if loss is not None}

    def means(self) -> dict[int, Tensor]:
        """The mean losses of whole microbatches that this rank computed."""
        found, parts = self.computed(), self.parts() if self.slices > 1 else {}
        if not parts:
            return found
        means = {}
        for first in range(0, self.microbatches, self.slices):
            its = range(first, first + self.slices)
            weight = sum(self.weights.parts[part] for part in its)
            means[first // self.slices] = torch.stack([parts[part] for part in its]).sum() / (weight or torch.nan)
        return means

    def parts(self) -> dict[int, Tensor]:
        """The contribution of each known microbatch loss to the mean loss, in microbatch order. A microbatch of weight
        zero contributes zero, even if its loss is nan, as a mean over no tokens is.
        """
        losses = self.computed()
        weights = [self.weights.parts[microbatch] for microbatch in losses]
        parts = foreach_mul([_wide(loss) for loss in losses.values()], weights) if losses else ()
        return {
            microbatch: part if weight else torch.zeros_like(part)
            for microbatch, part, weight in zip(losses, parts, weights, strict=True)
        }


def _wide(loss: Tensor) -> Tensor:
    """The loss in float32 at least, so that losses of many microbatches can be added up."""
    return loss if loss.dtype in _WIDE else loss.float()


_WIDE = (torch.float32, torch.float64)


def _times(gradient: Tensor, factor: float | Tensor) -> Tensor:
    """The product, in the type of the gradient even if the factor is a float64 scalar."""
    return (gradient * factor).to(gradient.dtype)


class WholeLoss:
    """A criterion that is called once, with the outputs of all microbatches of a batch.

    Args:
        microbatches: their number.
        labels: the labels of the batch.
    """

    def __init__(self, microbatches: int, labels: object) -> None:
        self._labels = labels
        self._outputs: list[object] = [None] * microbatches  # leaves of a new graph
        self._missing = microbatches

    def add(
        self, criterion: Callable[..., Tensor], microbatch: int, output: object, *, training: bool
    ) -> tuple[list[GradientEdge], Tensor | None]:
        """Takes the output of a microbatch, and returns its edges. With the last one, computes the loss and the
        gradients of all outputs, and returns the loss, too.
        """
        leaves, spec = tree_flatten(output)
        wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        edges = [get_gradient_edge(leaf) for leaf, wants in zip(leaves, wanted, strict=True) if wants]
        if not self._missing:
            return edges, None  # the stage is computed again
        given = [
            leaf.detach().requires_grad_(wants) if isinstance(leaf, Tensor) else leaf
            for leaf, wants in zip(leaves, wanted, strict=True)
        ]
        self._outputs[microbatch] = tree_unflatten(given, spec)
        self._missing -= 1
        if self._missing:
            return edges, None
        loss = criterion(merge(self._outputs), self._labels)
        if training and loss.requires_grad:
            loss.backward()
        return edges, loss.detach()

    def gradients(self, microbatch: int, scale: float | Tensor) -> list[Tensor]:
        """The gradients of the output of a microbatch."""
        leaves, _ = tree_flatten(self._outputs[microbatch])
        self._outputs[microbatch] = None
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        return [torch.zeros_like(leaf) if leaf.grad is None else _times(leaf.grad, scale) for leaf in wanted]


def require_whole_loss(context: Context, criterion: Callable[..., Any] | None) -> None:
    """Raises UsageError if a loss cannot be that of a whole batch."""
    if criterion is None or criterion is own_loss:
        raise UsageError(
            'loss_over="batch" needs criterion=, which is called with the outputs of all microbatches: let the module '
            "return what its loss is computed from, and pass the loss as criterion"
        )
    if context.data_size > 1:
        raise UsageError(
            'loss_over="batch" is not possible with replicas, since no rank has the outputs of all: use one replica, '
            "with more pipeline or tensor ranks"
        )


def require_forwards_first(schedule: Schedule, given: object) -> None:
    """Raises UsageError unless the last stage runs all forwards before its first backward."""
    last = schedule.placement.num_stages - 1
    for rank in schedule.placement.ranks_of(last):
        kinds = [
            each.kind for each in schedule.actions(rank) if each.stage == last and each.kind in (Kind.F, Kind.B, Kind.I)
        ]
        is_alone = len(schedule.placement.ranks_of(last)) == 1
        if not is_alone or kinds != sorted(kinds, key=lambda kind: kind is not Kind.F):
            raise UsageError(
                f'loss_over="batch" needs a schedule whose last stage runs all forwards first, such as "gpipe" or '
                f'"looped-bfs": {schedule.name!r} does not'
            )
    if isinstance(given, Divided):
        raise UsageError('loss_over="batch" needs a batch that is not divided: pass the whole batch')


def merged_outputs(results: Results, transport: Transport, placement: Placement) -> object:
    """The merged outputs of the last stage, or None if they are not kept. If several ranks hold it, they exchange their
    outputs.
    """
    if not results.keep_outputs:
        return None
    stage, device, tags = placement.num_stages - 1, transport.device, [*tags_of(Content.ACTIVATION)]
    arriving, leaving = list[ActivationWire](), list[ActivationWire]()
    for peer in (rank for rank in placement.ranks_of(stage) if rank != transport.rank):
        ends = (transport.rank, peer), (peer, transport.rank)
        transport.connect([Channel(*each, tag) for each in ends for tag in tags])
        for wires, holder in ((arriving, peer), (leaving, transport.rank)):
            starts = starts_of(transport, peer, tags, receives=wires is arriving)
            shared = transport.link(peer), Buffers(device), starts, Expectations(), deque[ActivationWire]()
            wires += [
                ActivationWire(Value(Content.ACTIVATION, stage, microbatch), Slot(), *shared)
                for microbatch in range(results.microbatches)
                if placement.rank_of(stage, microbatch) == holder
            ]
    for wire in leaving:
        tensors, wire.slot.spec = flatten(results.outputs[wire.value.microbatch], device)
        wire.slot.tensors = [tensor.contiguous() for tensor in tensors]
    posts = [Operation(wire.post, Doing.POST, wire.value, wire) for wire in arriving]
    sends = [Operation(wire.send, Doing.SEND, wire.value, wire) for wire in leaving]
    waits = [Operation(wire.wait, Doing.WAIT, wire.value, wire) for wire in arriving]
    run([*posts, *sends, *waits, *(Operation(wire.release, Doing.RELEASE, wire.value, wire) for wire in leaving)])
    for wire in arriving:
        tensors, spec = wire.slot.tensors, wire.slot.spec
        results.outputs[wire.value.microbatch] = tensors[0] if spec is None else tree_unflatten(tensors, spec)
    if (slices := results.slices) > 1:
        firsts = range(0, results.microbatches, slices)
        return merge([merge(results.outputs[first : first + slices], dim=1) for first in firsts])
    if results.wanted is not None:
        return merge([results.outputs[microbatch] for microbatch in results.wanted]) if results.wanted else None
    return merge(results.outputs, sizes=results.sizes)
