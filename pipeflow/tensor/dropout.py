"""Dropout whose masks are the same on all tensor ranks, or different, like its input."""

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
    """nn.Dropout with a mask that is the same on every tensor rank, or with its own mask on each.

    Masks are drawn from the current RandomTracker. Without a tracker, a group of one rank draws from torch's default
    generator.

    Args:
        p, inplace: as in nn.Dropout.
        parallel_input: True if each rank has its part of the input (of the heads, the hidden dimension or the
            sequence), which gets its own mask. False if the input, and so the mask, is the same on every rank.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError in training without `manual_seed` if there are several ranks, and if torch's checkpoint recomputes
    it: only `pipeflow.tensor.checkpoint` replays a tracker.
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
        """False if it draws masks, since it uses its own generators."""
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
                f"{self._get_name()} was recomputed in a backward with another mask than the first: use "
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
        """A layer with the options of `module`, which is not changed. `options` are other arguments of this class."""
        if not isinstance(module, nn.Dropout):
            raise UsageError(f"{cls.__name__} is made from an nn.Dropout, got {type(module).__name__}")
        return cls(module.p, module.inplace, group=group, **options).train(module.training)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}, parallel_input={self.parallel_input}"
