"""What ranks tell each other: barriers and decisions of all ranks, the last stage's outputs for the other stages, and
values of replicas. Each call raises the error of a rank that fails on all ranks, and opens channels after an earlier
error. Operations: what an Accelerator does among ranks, whichever library's it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object, exchange, gather_rows
from pipeflow.engine.parallel.transport.protocol import Tag
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.torch_private.trees import tree_map_only
from pipeflow.training.optim.clip import clip_grad_norm_

PADDING = -100
"""The value that pads sequences of different lengths, as in transformers."""


def wait_for_all(context: Context, call: str = "") -> None:
    """Waits until all ranks have called it. `call` describes this rank's call, as in `Alarm.raised_everywhere`."""
    numbers_of_all(context, 0.0, call)


def numbers_of_all(context: Context, number: float, call: str = "") -> list[float]:
    """The number of each rank. All ranks call it together."""
    with context.alarm.raised_everywhere(call):
        return [told for [told] in all_gather(context.world, [float(number)])]


def objects_of_all(context: Context, value: object) -> list[Any]:
    """The value of each rank, made of plain values. All ranks call it together."""
    with context.alarm.raised_everywhere():
        return all_gather_object(context.world, value)


class _Place(NamedTuple):
    """Stands for the tensor of this number among those that are sent."""

    number: int


def shared_outputs(outputs: Any, context: Context) -> Any:
    """Sends outputs (tensors and plain values in tuples, lists and dicts) that one or two ranks of a pipeline have to
    all of its ranks. They call it together; ranks without outputs pass None.
    """
    transport = context.transport
    tensors: list[Tensor] = []

    def place(tensor: Tensor) -> _Place:
        tensors.append(tensor.contiguous())
        return _Place(len(tensors) - 1)

    structure = None if outputs is None else tree_map_only(Tensor, place, outputs)
    mine = None if outputs is None else (structure, [(tensor.shape, tensor.dtype) for tensor in tensors])
    everyone: list[Any] = all_gather_object(transport, mine)
    source = next(rank for rank, told in enumerate(everyone) if told is not None)
    structure, looks = everyone[source]
    if transport.rank == source:
        for tensor in tensors:
            body = tensor.cpu()
            peers = [rank for rank, told in enumerate(everyone) if told is None]
            exchange(transport, Tag.CONTROL, dict.fromkeys(peers, body), {}, "sending the outputs")
    elif outputs is None:
        tensors = []
        for shape, dtype in looks:
            body = torch.empty(shape, dtype=dtype, device="cpu")
            exchange(transport, Tag.CONTROL, {}, {source: body}, "waiting for the outputs of the last stage")
            tensors.append(body.to(context.device))
    return tree_map_only(_Place, lambda its: tensors[its.number], structure, is_leaf=lambda it: isinstance(it, _Place))


def gathered(tree: Any, context: Context) -> Any:
    """Concatenates the tensors in `tree` of all replicas along dim 0; scalars are stacked. Other values stay this
    replica's. All replicas call it together, with tensors whose shapes differ only in dim 0. Raises the error of a rank
    that fails on all ranks.
    """
    with _together(context):
        return tree_map_only(Tensor, lambda tensor: _gathered(tensor, context), tree)


def padded(tree: Any, context: Context, dim: int, value: int = PADDING, *, at_front: bool = False) -> Any:
    """Pads the tensors in `tree` along `dim` with `value` to the longest length among all replicas: at their end, or at
    their beginning with `at_front`. Tensors without such a dimension stay as they are.
    """

    def pad(tensor: Tensor) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor
        length = torch.tensor([tensor.shape[dim]], device=context.device)
        context.data.all_reduce_max(length).wait()
        shape = [*tensor.shape]
        shape[dim] = int(length) - tensor.shape[dim]
        if not shape[dim]:
            return tensor
        fill = tensor.new_full(shape, value)
        return torch.cat([fill, tensor] if at_front else [tensor, fill], dim)

    with _together(context):
        return tree if context.data_size == 1 else tree_map_only(Tensor, pad, tree)


def reduced(tree: Any, context: Context, how: str) -> Any:
    """Combines the tensors in `tree` of all replicas, whose shapes are the same: "mean", "sum", "max" or "min"."""
    combine = _COMBINED[how]
    return tree_map_only(Tensor, lambda tensor: combine(gathered(tensor[None], context)), tree)


_COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda tensors: tensors.sum(0) / len(tensors),
    "sum": lambda tensors: tensors.sum(0),
    "max": lambda tensors: tensors.amax(0),
    "min": lambda tensors: tensors.amin(0),
}


def _together(context: Context) -> AbstractContextManager[None]:
    """The alarm, which also opens channels after an error, if replicas exchange anything."""
    return nullcontext() if context.data_size == 1 else context.alarm.raised_everywhere()


def _gathered(tensor: Tensor, context: Context) -> Tensor:
    part = (tensor if tensor.dim() else tensor[None]).contiguous().to(context.device)
    return part if context.data_size == 1 else torch.cat(gather_rows(context.data, part))


def clipped_norm(pipeline: Pipeline, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips the whole model's gradient. Returns its norm before clipping, in float32."""
    return clip_grad_norm_(pipeline, max_norm, norm_type).float()


class Operations:
    """The operations of an Accelerator, by accelerate's names. All ranks call them together."""

    _context: Context

    @property
    def _pipeline(self) -> Pipeline:
        raise NotImplementedError

    def clip_grad_norm_(self, parameters: object, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the whole model's gradient, whatever parameters are passed. Returns the norm before clipping."""
        return clipped_norm(self._pipeline, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Concatenates the tensors of all replicas along dim 0; scalars are stacked."""
        return gathered(tensor, self._context)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads tensors to the length of the longest among all replicas."""
        return padded(tensor, self._context, dim, pad_index, at_front=pad_first)

    def wait_for_everyone(self) -> None:
        """Waits until all ranks have called it."""
        wait_for_all(self._context)
