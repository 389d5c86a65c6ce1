"""The layers that a policy assigns to this rank, as cuts of the whole module."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch import nn

from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer.policies.base_policy import Policy
from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.stages.blocks import listed


def held_cuts(policy: Policy, module: nn.Module, plugin: HybridParallelPlugin) -> list[str] | None:
    """Asks the policy for this rank's layers of the whole module and for its shared parameters. Returns the names of
    the last blocks of all stages but the last, or None if no rank's policy names layers. All ranks call it together.

    Raises UsageError if a block is held by no rank or by several, if the ranks hold blocks in another order than that
    of their stages, and if shared parameters are not one parameter of the module.
    """
    with plugin.context.alarm.raised_everywhere():
        policy.set_model(module)
        policy.set_shard_config(plugin.shard_config)
        _require_shared(policy)
        held = {id(each) for layer in policy.get_held_layers() for each in layer.modules()}
        names = listed(module)
        mine = [name for name, each in module.named_modules() if name in names and id(each) in held]
        rows: list[Any] = all_gather_object(plugin.context.transport, mine)
        if not any(rows):
            return None
        order = [name for name, _ in module.named_modules() if name in names]
        for name in order:
            if len(holders := [rank for rank, row in enumerate(rows) if name in row]) == 1:
                continue
            said = f"ranks {', '.join(map(str, holders))}" if holders else "no rank"
            raise UsageError(f"{name} is held by {said}: get_held_layers must return each block on one rank")
        owner = {name: rank for rank, row in enumerate(rows) for name in row}
        runs = [(rank, list(run)[-1]) for rank, run in groupby(order, owner.__getitem__)]
        wanted = [plugin.placement.rank_of(stage) for stage in range(plugin.placement.num_stages)]
        if [rank for rank, _ in runs] != wanted:
            raise UsageError(
                f"get_held_layers gives stages to the ranks {[rank for rank, _ in runs]}, but they belong to {wanted}: "
                "use the numbers of pipeline_stage_manager.get_stage_index, or leave the method out and set "
                "num_layers_per_stage"
            )
    return [last for _, last in runs[:-1]]


def _require_shared(policy: Policy) -> None:
    for shared in policy.get_shared_params():
        if len({id(parameter) for parameter in shared.values()}) > 1:
            raise UsageError(
                f"{type(policy).__name__}.get_shared_params has different parameters: make them one in the module, as "
                "with b.weight = a.weight; its stages are then tied"
            )
