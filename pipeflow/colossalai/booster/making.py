"""Makes a rank's Pipeline from a whole module, as a plugin says."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import nn

from pipeflow.colossalai.booster.batches import Batches, Loss, samples_of
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer.policies.base_policy import Policy
from pipeflow.colossalai.shardformer.shard.sharder import ModelSharder
from pipeflow.core.errors import UsageError
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage
from pipeflow.tensor.sharded import shard
from pipeflow.tensor.table import DEFAULT_RULES


def make_whole(module: nn.Module, plugin: HybridParallelPlugin, loss: Loss, batches: Batches) -> Pipeline:
    """Makes a Pipeline with one stage, the module itself."""
    policy = plugin.settings.custom_policy
    if policy is None:
        shard(module, group=plugin.context.tensor)
    else:
        sharder = ModelSharder(module, policy, plugin.shard_config)
        sharder.shard()
        module = sharder.model
    made = Pipeline(module, plugin.schedule(1), criterion=loss, weigh=loss.weigh)
    made.runner.read = batches.read
    return _compiled(made, plugin)


def make_stages(
    module: nn.Module, plugin: HybridParallelPlugin, loss: Loss, batches: Batches, first: object
) -> Pipeline:
    """Makes a Pipeline over several ranks, planned with a first batch.

    Raises UsageError as `Pipeline.from_module` does, and if the policy replaces a layer that stages share.
    """
    policy = plugin.settings.custom_policy
    schedule, (example, _) = plugin.schedule(samples_of(first)), batches.read(first)
    with torch.enable_grad():
        rules = DEFAULT_RULES if policy is None else ()
        made = Pipeline.from_module(module, schedule, example, cuts=plugin.cuts, rules=rules)
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
