"""accelerate.utils, whose operations among processes are those among replicas: `pipeflow.accelerate.utils` replaces
`accelerate.utils` in imports. All ranks call them together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import accelerate.utils as theirs
import torch
from torch import Tensor

from pipeflow.adapters.ranks import gathered, padded, reduced
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.engine.torch_private.trees import tree_map, tree_map_only


def gather(tensor: Any) -> Any:
    """Concatenates the tensors of all replicas along dim 0; scalars are stacked."""
    return gathered(tensor, current_context())


class _Numbers(NamedTuple):
    """A tensor as a plain value."""

    values: list[Any]
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Numbers:
        return cls(tensor.detach().flatten().tolist(), tensor.shape, tensor.dtype)

    def tensor(self) -> Tensor:
        return torch.tensor(self.values, dtype=self.dtype, device="cpu").view(self.shape)


def gather_object(object: Any) -> list[Any]:
    """Joins the lists of all replicas. Their items are numbers, strings, tensors, and containers of these; tensors
    arrive on the CPU. Raises UsageError for others.
    """
    return [each for one in _of_replicas(object) for each in one]


def _of_replicas(value: object) -> list[Any]:
    """The value of each replica, from the ranks with this rank's place in it."""
    context = current_context()
    with context.alarm.raised_everywhere():
        told = all_gather_object(context.replicas, tree_map_only(Tensor, _Numbers.of, value))
    return [tree_map(_restored, each, is_leaf=_is_numbers) for each in told]


def _is_numbers(value: object) -> bool:
    return isinstance(value, _Numbers)


def _restored(value: Any) -> Any:
    return value.tensor() if _is_numbers(value) else value


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Returns the tensors of one replica."""
    return tree_map_only(Tensor, lambda each: gather(each[None])[from_process], tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the items of the list by those of one replica, and returns it."""
    object_list[:] = _of_replicas(object_list)[from_process]
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combines the tensors of all replicas: their "mean", "sum" or "max"; "none" leaves each its own. Raises UsageError
    for another reduction.
    """
    if reduction == "none":
        return tensor
    if reduction not in ("mean", "sum", "max"):
        raise UsageError(f'reduction must be "mean", "sum", "max" or "none", got {reduction!r}')
    return tree_map_only(Tensor, lambda each: each * scale, reduced(tensor, current_context(), reduction))


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pads tensors along `dim` with `pad_index` to the length of the longest among all replicas: at their end, or at
    their beginning with `pad_first`.
    """
    return padded(tensor, current_context(), dim, pad_index, at_front=pad_first)


def __getattr__(name: str) -> Any:
    """Other names of accelerate's module."""
    return getattr(theirs, name)
