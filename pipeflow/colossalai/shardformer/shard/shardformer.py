"""ColossalAI's ShardFormer: a model over tensor ranks, without a pipeline."""

from __future__ import annotations

from torch import Tensor, nn

from pipeflow.colossalai.layout import tensor_group
from pipeflow.colossalai.shardformer.policies.auto_policy import listed_policy
from pipeflow.colossalai.shardformer.policies.base_policy import Policy
from pipeflow.colossalai.shardformer.shard.optimizations import optimize
from pipeflow.colossalai.shardformer.shard.sequences import require_whole
from pipeflow.colossalai.shardformer.shard.shard_config import ShardConfig
from pipeflow.colossalai.shardformer.shard.sharder import ModelSharder
from pipeflow.parallel.sharding import partial_in
from pipeflow.parallel.transport.group import Alone, Group
from pipeflow.stages.blocks import listed
from pipeflow.tensor.sharded import shard


class ShardFormer:
    """Shards models over tensor ranks. All ranks make one together, because it arranges the processes.

    Args:
        shard_config: the settings.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config
        self._group: Group = Alone()
        if shard_config.enable_tensor_parallelism:
            self._group = tensor_group(shard_config.tensor_parallel_process_group)

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, list[dict[int, Tensor]]]:
        """Splits the model's layers in place with `pipeflow.tensor.shard`, or replaces them as `policy` says, or the
        policy listed for the model's class. Returns the model and the policy's shared parameters. Call the model and
        differentiate its loss as usual, with the same batch on all ranks.

        Raises UsageError as `pipeflow.tensor.shard` and ModelSharder do.
        """
        optimize(model, self.shard_config)
        shared: list[dict[int, Tensor]] = []
        policy = policy or listed_policy(model)
        if policy is None:
            require_whole(self.shard_config.sequence_parallelism_mode)
            shard(model, group=self._group)
        else:
            sharder = ModelSharder(model, policy, self.shard_config)
            shared, model = sharder.shard(), sharder.model
        if self._group.size > 1:
            for parameter in partial_in(model):
                _sum_gradient(parameter, self._group)
        if self.shard_config.enable_jit_fused:
            for name in listed(model) or [""]:
                model.get_submodule(name).compile()
        return model, shared


def _sum_gradient(parameter: nn.Parameter, group: Group) -> None:
    """Sums the parameter's gradient over the tensor ranks, since each computes a part of it."""

    def summed(gradient: Tensor) -> Tensor:
        whole = gradient.detach().clone().contiguous()
        group.all_reduce(whole).wait()
        return whole

    if parameter.requires_grad:
        parameter.register_hook(summed)
