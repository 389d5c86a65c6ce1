"""The layout of the processes, which ColossalAI's programs choose after their launch: with a plugin of a booster, or
with a process group of a ShardConfig.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context, current_context, is_launched
from pipeflow.parallel.launch import launch
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.random import manual_seed
from pipeflow.training.launch import current_config, keep_config


def lay_out(pipeline: int, tensor: int) -> Context:
    """The context with these sizes, the rest of the world replicas: the current one, or where its sizes are others, a
    new one of the same processes. Dropout over tensor ranks is then seeded by torch's seed on rank 0. All ranks call it
    together.

    Raises UsageError before a launch, and where the world does not fit; then the current context stays.
    """
    if not is_launched():
        raise UsageError("nothing was launched: call colossalai.launch_from_torch() first")
    context = current_context()
    if (context.pipeline_size, context.tensor_size) == (pipeline, tensor):
        return context
    Layout.of(context.world_size, pipeline, tensor)
    with context.alarm.raised_everywhere():
        everyone: list[Any] = all_gather_object(context.world, (pipeline, tensor, torch.initial_seed()))
        if any(each[:2] != everyone[0][:2] for each in everyone):
            raise UsageError(f"the ranks ask for other sizes of pipeline and tensor: {[each[:2] for each in everyone]}")
    config, timeout, device = current_config(), context.world.timeout, context.device
    context.close()
    context = launch(pipeline, tensor, timeout=timeout, device=device)
    keep_config(config)
    manual_seed(everyone[0][2])
    return context


def tensor_group(process_group: Any) -> Group:
    """The tensor group of the context, laid out as `process_group` says: a group of torch.distributed's, whose ranks
    are neighbours; a group of pipeflow's, which is returned; or None for the ranks that the launch laid out, or for
    all of the world where it laid out none.

    Raises UsageError for ranks that are no neighbours, and as `lay_out`.
    """
    if isinstance(process_group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(process_group)
        context = lay_out(current_context().pipeline_size if is_launched() else 1, len(ranks))
        if list(context.layout.tensor_ranks(context.rank)) != ranks:
            raise UsageError(
                f"the tensor ranks of rank {context.rank} are {list(context.layout.tensor_ranks(context.rank))}, and "
                f"the process group has {ranks}: make groups of neighbours"
            )
        return context.tensor
    if process_group is not None:
        group: Group = process_group
        return group
    if is_launched() and current_context().layout == Layout(data=current_context().world_size):
        return lay_out(1, current_context().world_size).tensor
    return lay_out(current_context().pipeline_size, current_context().tensor_size).tensor
