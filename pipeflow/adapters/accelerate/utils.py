"""accelerate.utils, whose operations among processes are those among replicas: `pipeflow.accelerate.utils` replaces
`accelerate.utils` in imports. All ranks call them together.
"""

from __future__ import annotations

from typing import Any

import accelerate.utils as theirs
from torch import Tensor

from pipeflow.adapters.ranks import gathered, padded, reduced, trees_of_replicas
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.torch_private.trees import tree_map_only


def gather(tensor: Any) -> Any:
    """Concatenates the tensors of all replicas along dim 0; scalars are stacked."""
    return gathered(tensor, current_context())


def gather_object(object: Any) -> list[Any]:
    """Joins the lists of all replicas. Their items are numbers, strings, tensors, and containers of these; tensors
    arrive on the CPU. Raises UsageError for others.
    """
    return [each for one in trees_of_replicas(object, current_context()) for each in one]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Returns the tensors of one replica."""
    return tree_map_only(Tensor, lambda each: gather(each[None])[from_process], tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the items of the list by those of one replica, and returns it."""
    object_list[:] = trees_of_replicas(object_list, current_context())[from_process]
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
