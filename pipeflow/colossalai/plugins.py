"""ColossalAI's `colossalai.booster.plugin`: plugins that say how a Booster makes a model parallel."""

from __future__ import annotations

from functools import cache
from inspect import signature
from math import lcm
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from pipeflow.colossalai.layout import lay_out
from pipeflow.colossalai.options import Elsewhere, require_nothing_else
from pipeflow.colossalai.plugin_settings import ELSEWHERE, Settings, require_fits
from pipeflow.colossalai.shard_config import ELSEWHERE as OF_SHARDS
from pipeflow.colossalai.shard_config import ShardConfig
from pipeflow.colossalai.stage_manager import Groups
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.optim.precision import require_dtype
from pipeflow.schedules import make_schedule
from pipeflow.training.data.loader import DataParallelLoader, get_dataloader

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


_OF_ZERO = {
    "norm_type": Elsewhere(2.0, "max_norm is a norm of order 2; use pipeflow.clip_grad_norm_"),
    "reduce_bucket_size_in_m": Elsewhere(12, "bucket sizes do not change results; remove it"),
    "master_weights": Elsewhere(True, "16-bit parameters always have float32 masters; use precision='fp32'"),
    "cast_inputs": Elsewhere(True, "inputs are always converted to the model's dtype; remove it"),
    "verbose": Elsewhere(False, "leave it out"),
    "extra_dp_size": Elsewhere(1, "states are distributed over all replicas; remove it"),
}


class TorchDDPPlugin(HybridParallelPlugin):
    """Replicas of the model. `Booster(mixed_precision=...)` sets their precision.

    Args:
        bucket_cap_mb: must be 25, the default.
        options: those of HybridParallelPlugin; `precision` is "fp32" by default.
    """

    def __init__(self, *, bucket_cap_mb: int = 25, **options: Any) -> None:
        super().__init__(1, 1, **{"precision": "fp32", "ddp_bucket_cap_mb": bucket_cap_mb, **options})


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Replicas that distribute optimizer states, or with stage 2 also gradients.

    Args:
        stage: 1 or 2.
        options: those of HybridParallelPlugin, and options in `_OF_ZERO` with the value that has no effect.

    Raises UsageError for another stage, and as HybridParallelPlugin does.
    """

    def __init__(self, stage: int = 1, **options: Any) -> None:
        if stage not in (1, 2):
            raise UsageError(f"stage must be 1 or 2, got {stage}: use TorchDDPPlugin for 0, GeminiDDP for 3")
        given = {name: options.pop(name) for name in _OF_ZERO if name in options}
        require_nothing_else(LowLevelZeroPlugin, given, _OF_ZERO, ())
        super().__init__(1, 1, zero_stage=stage, **options)


class GeminiPlugin:
    """This plugin is not supported: its constructor raises UsageError."""

    def __init__(self, **options: Any) -> None:
        raise UsageError(
            "GeminiPlugin is not supported: wrap the model with colossalai.nn.parallel.GeminiDDP, without a Booster, "
            "or use LowLevelZeroPlugin(stage=2)"
        )
