"""WholeLoss: a criterion that is called once, with the outputs of all microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.runtime.microbatch import Divided, merge
from pipeflow.engine.stages.loss import own_loss
from pipeflow.engine.torch_private.trees import tree_flatten, tree_unflatten


class WholeLoss:
    """The loss of a batch, from the outputs of its microbatches.

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

    def gradients(self, microbatch: int, scale: float) -> list[Tensor]:
        """The gradients of the output of a microbatch."""
        leaves, _ = tree_flatten(self._outputs[microbatch])
        self._outputs[microbatch] = None
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * scale for leaf in wanted]


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
