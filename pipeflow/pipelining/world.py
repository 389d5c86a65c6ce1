"""World: pipeflow's context for the process group of torch.distributed whose ranks hold the stages of a pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context, context_if_launched, keep, kept
from pipeflow.parallel.launcher import launch

_MADE = "pipelining.group"


def context_of(group: dist.ProcessGroup | None, device: torch.device) -> Context:
    """The context whose pipeline is the ranks of `group`, which call it together; None is torch's default group.

    A context of `pipeflow.launch` is used if it has this pipeline; otherwise one is launched for the group alone.
    Raises UsageError for a context of another pipeline or device.
    """
    if dist.is_initialized() and dist.get_backend(group) == "fake" and dist.get_world_size(group) > 1:
        raise UsageError("ranks of a fake process group cannot exchange tensors: start one process per rank")
    ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
    context = context_if_launched()
    if context is not None and kept(_MADE) not in (None, _identity(group)):  # torch's groups were made again since
        context.close()
        context = None
    if context is None:
        context = launch(device=device, group=group)
        keep(_MADE, _identity(group))
        return context
    held = tuple(context.transport.world_rank(rank) for rank in range(context.pipeline_size))
    if kept(_MADE) is None and held != ranks:
        raise UsageError(
            f"the stages are on the ranks {list(ranks)} of their process group, but pipeflow.launch made a pipeline of "
            f"the ranks {list(held)}: pass launch(pipeline={len(ranks)}), or leave launch out"
        )
    if context.device != _whole(device, context.device):
        raise UsageError(f"the stages are on {device}, but this process computes on {context.device}: use one device")
    return context


def _identity(group: dist.ProcessGroup | None) -> object:
    """What tells one process group from another, also if torch.distributed was initialized again."""
    return (group if group is not None else dist.group.WORLD) if dist.is_initialized() else 0


def _whole(device: torch.device, own: torch.device) -> torch.device:
    """The device with its index, which is that of this process if it has none."""
    return own if torch.device(device).type == own.type and torch.device(device).index is None else torch.device(device)
