"""Batches of a Booster: the part that the forward is called with, and the part that the criterion gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeflow.core.errors import UsageError
from pipeflow.stages.entries import LABELS, Entries

Criterion = Callable[[Any, Any], Tensor]


class Batches:
    """Reads batches for a module: a batch is a dict of its forward's arguments, a tuple of all of them, or the first
    one. Floating-point tensors are converted to `dtype`, unless it is None.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._entries = Entries(module)
        self._dtype = dtype

    def read(self, batch: object) -> tuple[dict[str, Any], object]:
        """Returns the forward's arguments by name, and the whole batch for the criterion."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        entries, _ = self._entries.of(batch if isinstance(batch, dict) else (batch, None))
        return self.cast(entries), batch

    def cast(self, tree: Any) -> Any:
        """Returns the tree with its floating-point tensors in the model's dtype."""
        dtype = self._dtype
        if dtype is None:
            return tree
        return tree_map(lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf, tree)


class Loss:
    """The loss of a microbatch in ColossalAI's form, computed from the output and the whole microbatch.

    Attributes:
        criterion: the criterion of the current call.
        weigh_labels: function that returns a microbatch's weight from its labels; None weighs by samples.
    """

    def __init__(self) -> None:
        self.criterion: Criterion | None = None
        self.weigh_labels: Callable[..., float] | None = None

    def __call__(self, output: Any, microbatch: Any) -> Tensor:
        assert self.criterion is not None
        return self.criterion(output, microbatch)

    @contextmanager
    def by(self, criterion: Criterion | None) -> Iterator[None]:
        """Uses `criterion` inside the `with` block; None keeps the current one."""
        before, self.criterion = self.criterion, self.criterion if criterion is None else criterion
        try:
            yield
        finally:
            self.criterion = before

    def weigh(self, microbatch: Any) -> float:
        """Returns the microbatch's weight in the batch's mean loss."""
        if self.weigh_labels is not None and isinstance(microbatch, Mapping):
            return self.weigh_labels(microbatch.get(LABELS))
        return float(samples_of(microbatch))


def samples_of(batch: object) -> int:
    """Number of samples in a batch. Raises UsageError for a batch without tensors."""
    tree: object = dict(batch) if isinstance(batch, Mapping) else batch
    found = next((len(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()), None)
    if found is None:
        raise UsageError(f"a batch must contain tensors, got a {type(batch).__name__} without one")
    return found


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
