"""ColossalAI's HybridParallelPlugin: tensor, pipeline and data parallelism together."""

from __future__ import annotations

from functools import cache
from inspect import signature
from math import lcm
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from pipeflow.colossalai.booster.plugin.elsewhere import ELSEWHERE
from pipeflow.colossalai.booster.plugin.fitting import require_fits
from pipeflow.colossalai.booster.plugin.groups import Groups
from pipeflow.colossalai.booster.plugin.settings import Settings
from pipeflow.colossalai.layout import lay_out
from pipeflow.colossalai.options import require_nothing_else
from pipeflow.colossalai.shardformer.shard.shard_config import ELSEWHERE as OF_SHARDS
from pipeflow.colossalai.shardformer.shard.shard_config import ShardConfig
from pipeflow.core.schedule import Schedule
from pipeflow.optim.precision import require_dtype
from pipeflow.schedules import make_schedule
from pipeflow.training.data import DataParallelLoader, get_dataloader

_OF_SHARDS = {*signature(ShardConfig).parameters, *OF_SHARDS} - {"others", "tensor_parallel_process_group", *ELSEWHERE}


class HybridParallelPlugin(Groups):
    """Arranges the processes as `tp_size` x `pp_size` x replicas, and says how a Booster trains. All ranks make one
    together, after `colossalai.launch_from_torch()`.

    Args:
        tp_size: number of tensor ranks.
        pp_size: number of pipeline ranks.
        options: options of `Settings` and ShardConfig, and options in `ELSEWHERE` with the value that has no effect.

    Attributes:
        settings: the Settings from the options.
        shard_config: the ShardConfig from the options.
        context: this process's context.

    Raises UsageError for an unknown option, for invalid values, and if the sizes do not fit the world.
    """

    def __init__(self, tp_size: int, pp_size: int, **options: Any) -> None:
        if options.get("sp_size", 0) is None:  # the default there
            del options["sp_size"]
        own = {name: options.pop(name) for name in signature(Settings).parameters if name in options}
        of_shards = {name: options.pop(name) for name in _OF_SHARDS if name in options}
        require_nothing_else(HybridParallelPlugin, options, ELSEWHERE, {*signature(Settings).parameters, *_OF_SHARDS})
        self.settings = Settings(tp_size, pp_size, **own)
        config = ShardConfig(**{"enable_tensor_parallelism": tp_size > 1} | of_shards)
        self.context = lay_out(pp_size, tp_size if config.enable_tensor_parallelism else 1)
        require_fits(self.settings, self.context)
        self.half = self.settings.half()
        if self.half is not None:
            require_dtype(self.half.dtype, self.context.device)
        config.tensor_parallel_process_group = self.tp_group if dist.is_initialized() else self.context.tensor
        self.shard_config = config
        self.schedule_of = cache(self._schedule_of)
        self.placement = self.schedule_of(1).placement
        self.num_layers_per_stage = self.settings.num_layers_per_stage
        config.pipeline_stage_manager = self.stage_manager if pp_size > 1 else None

    def schedule(self, samples: int) -> Schedule:
        """Returns the schedule for a batch of `samples` samples. Without a pipeline it has one microbatch."""
        given = self.settings
        if given.pp_size == 1:
            return self.schedule_of(1)
        if given.num_microbatches is not None:
            return self.schedule_of(given.num_microbatches)
        assert given.microbatch_size is not None
        return self.schedule_of(-(-samples // given.microbatch_size))

    def _schedule_of(self, microbatches: int) -> Schedule:
        given = self.settings
        options: dict[str, Any] = {"ranks": given.pp_size, "microbatches": microbatches}
        if given.pp_size == 1 or given.pp_style == "1f1b":
            return make_schedule("1f1b", **options)
        if given.pp_style == "zbv":
            return make_schedule("zb-v", **options)
        return make_schedule("interleaved-1f1b", **options, chunks=given.num_model_chunks)

    @property
    def cuts(self) -> list[float] | None:
        """Costs of blocks that make stages get `num_layers_per_stage` blocks; None without that option."""
        layers = self.settings.num_layers_per_stage
        return None if layers is None else [lcm(*layers) / each for each in layers for _ in range(each)]

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        **options: Any,
    ) -> DataParallelLoader:
        """Returns a loader of this replica's part of the data; arguments as in `pipeflow.get_dataloader`."""
        return get_dataloader(dataset, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, **options)
