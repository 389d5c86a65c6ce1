"""The layout of the processes. ColossalAI's programs choose it after their launch, with a Booster's plugin or with a
ShardConfig's process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context, current_context, is_launched
from pipeflow.parallel.launcher import launch
from pipeflow.parallel.layout import WorldLayout
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.random import manual_seed
from pipeflow.training.config.launch import current_config, keep_config


def lay_out(pipeline: int, tensor: int) -> Context:
    """Returns a context with these pipeline and tensor sizes; further ranks are replicas. It is the current context if
    its sizes are the same, otherwise a new one for the same processes, with tensor-parallel dropout seeded from
    torch's seed on rank 0. All ranks call it together.

    Raises UsageError before a launch, and if the sizes do not fit the world; the current context then stays.
    """
    if not is_launched():
        raise UsageError("nothing was launched: call colossalai.launch_from_torch() first")
    context = current_context()
    if (context.pipeline_size, context.tensor_size) == (pipeline, tensor):
        return context
    WorldLayout.of(context.world_size, pipeline, tensor)
    with context.alarm.raised_everywhere():
        everyone: list[Any] = all_gather_object(context.world, (pipeline, tensor, torch.initial_seed()))
        if any(each[:2] != everyone[0][:2] for each in everyone):
            raise UsageError(f"the ranks ask for different (pipeline, tensor) sizes: {[each[:2] for each in everyone]}")
    config, timeout, device = current_config(), context.world.timeout, context.device
    context.close()
    context = launch(pipeline, tensor, timeout=timeout, device=device)
    keep_config(config)
    manual_seed(everyone[0][2])
    return context


def tensor_group(process_group: Any) -> Group:
    """Returns the tensor group for `process_group`. If it is a group of torch.distributed with neighbouring ranks, the
    layout is adapted to it. If it is a group of pipeflow, it is returned. If it is None, the group is the launch's
    tensor ranks, or the whole world if the launch has none.

    Raises UsageError if the ranks are not neighbours, and as `lay_out` does.
    """
    if isinstance(process_group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(process_group)
        context = lay_out(current_context().pipeline_size if is_launched() else 1, len(ranks))
        if list(context.layout.tensor_ranks(context.rank)) != ranks:
            raise UsageError(
                f"the tensor ranks of rank {context.rank} are {list(context.layout.tensor_ranks(context.rank))}, but "
                f"the process group has {ranks}: make groups of neighbouring ranks"
            )
        return context.tensor
    if process_group is not None:
        group: Group = process_group
        return group
    if is_launched() and current_context().layout == WorldLayout(data=current_context().world_size):
        return lay_out(1, current_context().world_size).tensor
    return lay_out(current_context().pipeline_size, current_context().tensor_size).tensor
