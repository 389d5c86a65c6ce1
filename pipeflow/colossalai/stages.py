"""Makes a rank's Pipeline from a whole module, as a plugin and a policy say."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn

from pipeflow.colossalai.batches import Batches, Loss, samples_of
from pipeflow.colossalai.gemini import spread
from pipeflow.colossalai.lazy_init import copy_of_lazy, fill_owned
from pipeflow.colossalai.plugins import HybridParallelPlugin
from pipeflow.colossalai.policies import Policy, listed_policy
from pipeflow.colossalai.shard_config import require_whole
from pipeflow.colossalai.sharders import ModelSharder
from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.blocks import listed
from pipeflow.stages.stage import ModuleStage
from pipeflow.tensor.module_sharding import shard
from pipeflow.tensor.table import DEFAULT_RULES


def held_cuts(policy: Policy, module: nn.Module, plugin: HybridParallelPlugin) -> list[str] | None:
    """Asks the policy for this rank's layers of the whole module and for its shared parameters. Returns the names of
    the last blocks of all stages but the last, or None if no rank's policy names layers. All ranks call it together.

    Raises UsageError if no rank or several ranks hold a block, or if the order of the blocks is not the order of the
    ranks' stages. Also raises it if shared parameters are not one parameter of the module.
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


def make_whole(module: nn.Module, plugin: HybridParallelPlugin, loss: Loss, batches: Batches) -> Pipeline:
    """Makes a Pipeline with one stage, the module itself. With zero_stage=2 its parameters are whole from a forward to
    its backward, and their gradients and optimizer states distributed over the replicas.
    """
    whole = copy_of_lazy(module)
    policy = policy_of(module, plugin)
    if policy is None:
        shard(module, group=plugin.context.tensor)
    else:
        sharder = ModelSharder(module, policy, plugin.shard_config)
        sharder.shard()
        module = sharder.model
    if plugin.settings.zero_stage == 2 and plugin.dp_size > 1:
        if whole is not module:
            raise UsageError("zero_stage=2 shards parameters that have values: make the model without LazyInitContext")
        spread(module, plugin.context.mesh["data"], reshard_after_forward=False)
    made = Pipeline(module, plugin.schedule(1), criterion=loss, weigh=loss.weigh)
    made.runner.read = batches.read
    fill_owned(made, whole)
    return _compiled(made, plugin)


def policy_of(module: nn.Module, plugin: HybridParallelPlugin) -> Policy | None:
    """The plugin's policy, else the one listed for the module's class, else None. Raises UsageError if the plugin needs
    one.
    """
    policy = plugin.settings.custom_policy or listed_policy(module)
    if policy is None:
        require_whole(plugin.shard_config.sequence_parallelism_mode)
    return policy


def make_stages(
    module: nn.Module, plugin: HybridParallelPlugin, loss: Loss, batches: Batches, first: object
) -> Pipeline:
    """Makes a Pipeline over several ranks, planned with a first batch.

    Raises UsageError as `Pipeline.from_module` does, and if the policy replaces a layer that stages share.
    """
    policy = policy_of(module, plugin)
    schedule, (example, _) = plugin.schedule(samples_of(first)), batches.read(first)
    whole = copy_of_lazy(module)
    cuts = (None if policy is None else held_cuts(policy, module, plugin)) or plugin.cuts
    with torch.enable_grad():
        rules = DEFAULT_RULES if policy is None else ()
        made = Pipeline.from_module(module, schedule, example, cuts=cuts, rules=rules)
    fill_owned(made, whole)
    if policy is not None:
        with plugin.context.alarm.raised_everywhere():
            _carry_out(policy, made, plugin)
    loss.weigh_labels = made.runner.weigh
    made.runner.criterion, made.runner.weigh, made.runner.read = loss, loss.weigh, batches.read
    return _compiled(made, plugin)


def _compiled(made: Pipeline, plugin: HybridParallelPlugin) -> Pipeline:
    if plugin.shard_config.enable_jit_fused:
        made.compile()
    return made


def _carry_out(policy: Policy, made: Pipeline, plugin: HybridParallelPlugin) -> None:
    """Applies the policy to this rank's stages; the engine notices replaced parameters in the next step."""
    assert made.cut is not None
    owners = Counter(name for stage in made.cut.stages for name in stage.owned)
    before = dict(made.named_parameters())
    for stage in made.chunks:
        ModelSharder(cast(ModuleStage, stage).root, policy, plugin.shard_config).shard()
    after = dict(made.named_parameters())
    for name, parameter in before.items():
        if owners[name] > 1 and after.get(name) is not parameter:
            raise UsageError(f"the policy replaces {name}, which several stages share: remove it from the policy")
