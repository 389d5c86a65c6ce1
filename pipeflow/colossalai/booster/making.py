"""Makes a rank's Pipeline from a whole module, as a plugin says."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import nn

from pipeflow.colossalai.booster.batches import Batches, Loss, samples_of
from pipeflow.colossalai.booster.held import held_cuts
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.lazy.values import copy_of_lazy, fill_owned
from pipeflow.colossalai.nn.parallel import spread
from pipeflow.colossalai.shardformer.policies.auto_policy import listed_policy
from pipeflow.colossalai.shardformer.policies.base_policy import Policy
from pipeflow.colossalai.shardformer.shard.sequences import require_whole
from pipeflow.colossalai.shardformer.shard.sharder import ModelSharder
from pipeflow.core.errors import UsageError
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage
from pipeflow.tensor.sharded import shard
from pipeflow.tensor.table import DEFAULT_RULES


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
