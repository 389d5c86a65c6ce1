"""Dropout whose masks agree over the tensor ranks, or differ, as its input does."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.layer import TensorLayer
from pipeflow.tensor.random import current_tracker


class Dropout(TensorLayer):
    """nn.Dropout for an input that is the same on every rank, which then gets the same mask; or, with
    `parallel_input`, for one of which each rank has its part (of the heads, the hidden dimension or the sequence),
    which gets a mask of its own.

    Masks are drawn from the current RandomTracker. Without one, a group of one draws from torch's default generator.

    Args:
        group: by default the tensor group of the context, and without a launch the group of one.

    Raises UsageError in training without `manual_seed`, when there is more than one rank, and when torch's checkpoint
    computes it again: only `pipeflow.tensor.checkpoint` replays a tracker.
    """

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        parallel_input: bool = False,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        if not 0 <= p <= 1:
            raise UsageError(f"{self._get_name()} needs a probability from 0 to 1, got p={p}")
        self.p, self.inplace, self.parallel_input = p, inplace, parallel_input

    @property
    def compiles(self) -> bool:
        """Not where it draws, which is from generators of its own."""
        return self.p == 0

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        tracker = current_tracker()
        if tracker is None:
            if self.group.size > 1:
                raise UsageError("dropout over several tensor ranks needs pipeflow.tensor.manual_seed(seed) first")
            return functional.dropout(input, self.p, inplace=self.inplace)
        if torch._C._current_graph_task_id() != -1 and not tracker.is_replay:  # inside a backward
            raise UsageError(
                f"{self._get_name()} was computed again in a backward with another mask than the first: use "
                "pipeflow.tensor.checkpoint, which replays its masks, instead of torch.utils.checkpoint"
            )
        kept = 1 - self.p
        noise = torch.empty_like(input, requires_grad=False)
        noise.bernoulli_(kept, generator=tracker.own if self.parallel_input else tracker.shared)
        if kept:
            noise.div_(kept)
        return input.mul_(noise) if self.inplace else input * noise

    @classmethod
    def from_native_module(cls, module: nn.Dropout, group: Group | None = None, **options: Any) -> Self:
        """A layer that drops as `module` does. `options` are those of this class."""
        if not isinstance(module, nn.Dropout):
            raise UsageError(f"{cls.__name__} is made from an nn.Dropout, got {type(module).__name__}")
        return cls(module.p, module.inplace, group=group, **options).train(module.training)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}, parallel_input={self.parallel_input}"
