"""From a whole module to a rank's Pipeline, as a plugin says."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import nn

from pipeflow.colossalai.booster.batches import Batches, Loss, samples_of
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer.shard.sharder import ModelSharder
from pipeflow.core.errors import UsageError
from pipeflow.runtime.from_module import Parts, parts_of
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage
from pipeflow.tensor.sharded import shard
from pipeflow.tensor.table import DEFAULT_RULES


def make_whole(module: nn.Module, plugin: HybridParallelPlugin, loss: Loss, batches: Batches) -> Pipeline:
    """A Pipeline of one stage, which is the module itself."""
    policy = plugin.settings.custom_policy
    if policy is None:
        shard(module, group=plugin.context.tensor)
    else:
        sharder = ModelSharder(module, policy, plugin.shard_config)
        sharder.shard()
        module = sharder.model
    made = Pipeline(module, plugin.schedule(1), criterion=loss, weigh=loss.weigh)
    made.runner.read = batches.read
    return made


def make_stages(
    module: nn.Module, plugin: HybridParallelPlugin, loss: Loss, batches: Batches, first: object
) -> Pipeline:
    """A Pipeline of several ranks, planned by a first batch.

    Raises UsageError as `Pipeline.from_module`, and for a policy that replaces what stages share.
    """
    context, policy = plugin.context, plugin.settings.custom_policy
    schedule = plugin.schedule(samples_of(first))
    rules = DEFAULT_RULES if policy is None else ()
    with context.alarm.raised_everywhere(), torch.enable_grad():
        context.alarm.expect_slow()
        example, _ = batches.read(first)
        parts = parts_of(module, schedule, example, context, cuts=plugin.cuts, blocks=None, autocast=None, rules=rules)
        if policy is not None:
            _carry_out(parts, plugin)
    loss.weigh_labels = parts.weigh
    made = Pipeline(parts.chunks, schedule, criterion=loss, weigh=loss.weigh)
    made.cut, made.runner.read = parts.plan, batches.read
    return made


def _carry_out(parts: Parts, plugin: HybridParallelPlugin) -> None:
    policy = plugin.settings.custom_policy
    assert policy is not None
    owners = Counter(name for stage in parts.plan.stages for name in stage.owned)
    for stage in parts.chunks:
        before = dict(stage.named_parameters())
        ModelSharder(cast(ModuleStage, stage).root, policy, plugin.shard_config).shard()
        after = dict(stage.named_parameters())
        for name, parameter in before.items():
            if owners[name] > 1 and after.get(name) is not parameter:
                raise UsageError(f"the policy replaces {name}, which several stages share: leave it as it is")
