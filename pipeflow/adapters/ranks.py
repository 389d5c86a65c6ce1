"""The ranks of a script of another library: their context, which it may have launched before, and what they tell each
other: barriers and decisions of all ranks, the last stage's outputs for the other stages, and values of replicas. Each
call raises the error of a rank that fails on all ranks, and opens channels after an earlier error. Operations: what an
Accelerator does among ranks, whichever library's it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, context_if_launched
from pipeflow.engine.parallel.launcher import launch
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object, gather_rows, hear, tell
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.torch_private.trees import tree_map_only
from pipeflow.training.optim.clip import clip_grad_norm_


def launched(
    pipeline: int | None,
    tensor: int | None,
    data: int | None = None,
    *,
    device: torch.device | str | None = None,
    instead: str = "pass the same sizes to pipeflow.launch",
) -> Context:
    """The context, launched here unless it was before.

    Args:
        pipeline, tensor, data: the sizes that it must have; None for any.
        device: as in `launch`.
        instead: what to do if it has others.

    Raises UsageError if it has other sizes, and in a tensor mode other than "1d".
    """
    context = context_if_launched() or launch(pipeline, tensor or 1, device=device)
    require_whole_activations(context)
    here = context.data_size, context.pipeline_size, context.tensor_size
    wanted = tuple(size if asked is None else asked for asked, size in zip((data, pipeline, tensor), here, strict=True))
    if wanted != here:
        raise UsageError(
            f"the {context.world_size} processes are launched as {here[0]} replicas of {here[1]} pipeline ranks with "
            f"{here[2]} tensor ranks, but there are to be {wanted[0]}, {wanted[1]} and {wanted[2]}: start as many "
            f"processes as their product, and {instead}"
        )
    return context


def require_whole_activations(context: Context) -> None:
    """Raises UsageError in a tensor mode that divides activations between layers, which scripts do not expect, and in
    an elastic world, where they would go on as if no rank had died.
    """
    if context.elastic:
        raise UsageError(
            "scripts of other libraries do not go on without ranks that die: launch without elastic=True, or use "
            "execute_pipeline or pipeflow's Trainer"
        )
    if context.layout.sample_parts > 1:
        raise UsageError(
            f"the job was launched in tensor mode {context.layout.tensor_mode!r}, and this needs mode '1d': launch "
            "with tensor_mode='1d', in a configuration tensor=dict(mode='1d', size=...)"
        )


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


def shared_outputs(outputs: Any, context: Context) -> Any:
    """Sends outputs (tensors and plain values in tuples, lists and dicts) that one or two ranks of a pipeline have to
    all of its ranks. They call it together; ranks without outputs pass None.
    """
    transport = context.transport
    has_some = [bool(told) for [told] in all_gather(transport, [float(outputs is not None)])]
    source = has_some.index(True)
    if transport.rank == source:
        tell(transport, [rank for rank, has in enumerate(has_some) if not has], outputs)
    if outputs is not None:
        return outputs
    return tree_map_only(Tensor, lambda tensor: tensor.to(context.device), hear(transport, source))


def trees_of_replicas(tree: object, context: Context) -> list[Any]:
    """The tree of each replica, of tensors and plain values, from the ranks with this rank's place in it. Tensors
    arrive on the CPU. All ranks call it together.
    """
    replicas = context.replicas
    with context.alarm.raised_everywhere():
        found = []
        for teller in range(replicas.size):
            if teller == replicas.rank:
                tell(replicas, [rank for rank in range(replicas.size) if rank != teller], tree)
                found.append(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree))
            else:
                found.append(hear(replicas, teller))
        return found


def gathered(tree: Any, context: Context) -> Any:
    """Concatenates the tensors in `tree` of all replicas along dim 0; scalars are stacked. Other values stay this
    replica's. All replicas call it together, with tensors whose shapes differ only in dim 0. Raises the error of a rank
    that fails on all ranks.
    """
    with _together(context):
        return tree_map_only(Tensor, lambda tensor: _gathered(tensor, context), tree)


def padded(tree: Any, context: Context, dim: int, value: int, *, at_front: bool = False) -> Any:
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
