"""ColossalAI's `colossalai.booster.plugin`: plugins that say how a Booster makes a model parallel, their settings, and
what they know of the ranks: groups, and which ranks have the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import accumulate
from math import lcm
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from pipeflow.colossalai.policies import ELSEWHERE as OF_SHARDS
from pipeflow.colossalai.policies import Elsewhere, Policy, ShardConfig, require_nothing_else
from pipeflow.colossalai.processes import lay_out
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.schedules import make_schedule
from pipeflow.training.data import DataParallelLoader, get_dataloader
from pipeflow.training.optim.precision import HalfPrecision, require_dtype

STYLES: dict[str, tuple[str, int | None]] = {
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved-1f1b", None),
    "zbv": ("zb-v", 2),
}
"""The schedule of each style of a pipeline, and its number of stages per rank; None for any."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
_SCALER = (
    "initial_scale",
    "min_scale",
    "max_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
)


@dataclass(frozen=True)
class Settings:
    """The settings of a Booster's training.

    Attributes:
        tp_size: number of tensor ranks.
        pp_size: number of pipeline ranks.
        precision: "fp16" or "bf16" for 16-bit parameters with float32 masters; "fp32" keeps the model's dtype.
        zero_stage: 1 distributes the optimizer's states over the replicas; 2, without a pipeline, also the gradients,
            with torch's fully_shard; 0 distributes nothing.
        cpu_offload: optimizer states in CPU memory, for models on the CPU, where they are; refused on a GPU.
        num_microbatches, microbatch_size: number of microbatches per batch, or number of samples per microbatch; a
            pipeline needs one of the two. Without a pipeline a batch is one microbatch.
        initial_scale, min_scale, max_scale, growth_factor, backoff_factor, growth_interval, hysteresis: options of the
            LossScaler, for "fp16".
        max_norm: maximum norm of the whole model's gradient; 0 disables clipping.
        custom_policy: a policy that says which layers to replace, instead of pipeflow's rules.
        pp_style: "1f1b"; "interleaved" with `num_model_chunks` stages per rank; "zbv" with 2 stages per rank.
        num_model_chunks: number of stages per rank.
        num_layers_per_stage: number of blocks in each stage; by default they are distributed evenly.
        dp_outside: replicas are the outermost dimension of the ranks; False is refused if it makes a difference.
        overlap_p2p: transfers overlap computations; False is refused for "interleaved", which alone could differ.
        enable_metadata_cache: has no effect: shapes are sent until they repeat.

    Raises UsageError for invalid values.
    """

    tp_size: int
    pp_size: int
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    zero_stage: int = 0
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    max_norm: float = 0.0
    custom_policy: Policy | None = None
    pp_style: Literal["1f1b", "interleaved", "zbv"] = "1f1b"
    num_model_chunks: int = 1
    num_layers_per_stage: Sequence[int] | None = None
    cpu_offload: bool = False
    dp_outside: bool = True
    overlap_p2p: bool = True
    enable_metadata_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "num_model_chunks", "num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.precision not in _DTYPES:
            raise UsageError(f"precision must be one of {', '.join(_DTYPES)}, got {self.precision!r}")
        if self.zero_stage not in (0, 1, 2):
            raise UsageError(f"zero_stage must be 0, 1 or 2, got {self.zero_stage}: GeminiDDP also shards parameters")
        if self.zero_stage == 2 and self.pp_size > 1:
            raise UsageError(
                "zero_stage=2 needs pp_size=1: a stage adds up whole gradients of all microbatches before it reduces "
                "them, so there is nothing to save; use zero_stage=1"
            )
        if not self.max_norm >= 0:
            raise UsageError(f"max_norm must be positive, or 0 for no clipping, got {self.max_norm}")
        self._check_pipeline()
        if not self.overlap_p2p and self.pp_style == "interleaved":
            raise UsageError(
                "overlap_p2p=False is not supported with pp_style='interleaved': the engine posts receives before it "
                "needs them, and results do not depend on it; remove the option"
            )
        self.half()  # checks the options of the scaler

    def _check_pipeline(self) -> None:
        if self.pp_style not in STYLES:
            raise UsageError(f"pp_style must be one of {', '.join(STYLES)}, got {self.pp_style!r}")
        (_, chunks), given = STYLES[self.pp_style], self.num_model_chunks
        if chunks is None and given < 2:
            raise UsageError(f"pp_style='interleaved' needs num_model_chunks of at least 2, got {given}")
        if chunks is not None and given not in (1, chunks):
            raise UsageError(f"pp_style={self.pp_style!r} has {chunks} stages per rank, got num_model_chunks={given}")
        if self.num_microbatches is not None and self.microbatch_size is not None:
            raise UsageError("pass num_microbatches or microbatch_size, not both")
        if self.pp_size > 1 and self.num_microbatches is None and self.microbatch_size is None:
            raise UsageError("a pipeline needs num_microbatches or microbatch_size")
        stages = self.pp_size * (chunks or given)
        if self.num_layers_per_stage is not None and len(self.num_layers_per_stage) != stages:
            raise UsageError(f"num_layers_per_stage has {len(self.num_layers_per_stage)} numbers for {stages} stages")

    def half(self) -> HalfPrecision | None:
        """Returns the HalfPrecision; None for "fp32"."""
        dtype = _DTYPES[self.precision]
        return (
            None
            if dtype is None
            else HalfPrecision("parameters", dtype, {name: getattr(self, name) for name in _SCALER})
        )


def require_fits(settings: Settings, context: Context) -> None:
    """Raises UsageError for options that this layout or device cannot have."""
    if settings.cpu_offload and context.device.type != "cpu":
        raise UsageError(
            f"cpu_offload=True is not supported on {context.device.type}: optimizer states stay on the device of "
            "their parameters; distribute them with zero_stage=1"
        )
    if not settings.dp_outside and context.data_size > 1 and context.pipeline_size > 1:
        raise UsageError(
            "dp_outside=False is not supported with replicas of a pipeline: ranks of one pipeline are neighbours "
            "here, since they exchange more than replicas do; remove the option"
        )


_BUCKETS = "bucket sizes do not change results; remove it"
ELSEWHERE = {
    "sp_size": Elsewhere(1, "sequences are split only over the tensor ranks, by layers of pipeflow.tensor"),
    "broadcast_buffers": Elsewhere(True, "buffers are made equal when a Pipeline is made; remove it"),
    **dict.fromkeys(("bucket_cap_mb", "ddp_bucket_cap_mb"), Elsewhere(25, _BUCKETS)),
    "find_unused_parameters": Elsewhere(False, "parameters without a gradient are found automatically; remove it"),
    "check_reduction": Elsewhere(False, "every step checks it; remove it"),
    "gradient_as_bucket_view": Elsewhere(False, "leave it out"),
    "static_graph": Elsewhere(False, "leave it out"),
    **dict.fromkeys(("reduce_bucket_size_in_m", "zero_bucket_size_in_m"), Elsewhere(12, _BUCKETS)),
    "communication_dtype": Elsewhere(None, "gradients are summed in their own dtype; remove it"),
    "overlap_communication": Elsewhere(True, "reductions always overlap computations; remove it"),
    "scheduler_nodes": Elsewhere(None, "pp_style='zbv' takes its order from pipeflow.make_schedule; remove it"),
    "gradient_checkpoint_config": Elsewhere(None, "call model.gradient_checkpointing_enable() before boost"),
    "overlap_allgather": Elsewhere(False, "leave it out"),
    "fp8_communication": Elsewhere(False, "tensors are sent in their own dtype; remove it"),
    "use_fp8": Elsewhere(False, "use precision='bf16'"),
    "inner_ring_size": Elsewhere(None, "there is no ring attention; remove it"),
    "norm_type": Elsewhere(2.0, "max_norm is a norm of order 2; use pipeflow.clip_grad_norm_"),
    "master_weights": Elsewhere(True, "16-bit parameters always have float32 masters; use precision='fp32'"),
    "cast_inputs": Elsewhere(True, "inputs are always converted to the model's dtype; remove it"),
    "verbose": Elsewhere(False, "leave it out"),
    "extra_dp_size": Elsewhere(1, "states are distributed over all replicas; remove it"),
}
"""Options of plugins: each with the value that has no effect, and what to do instead of another value."""


_OF_SHARDS = {*signature(ShardConfig).parameters, *OF_SHARDS} - {"others", "tensor_parallel_process_group", *ELSEWHERE}


class HybridParallelPlugin:
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
        placement: the stages of each rank.

    Raises UsageError for an unknown option, for invalid values, and if the sizes do not fit the world.
    """

    def __init__(self, tp_size: int, pp_size: int, **options: Any) -> None:
        if options.get("sp_size", 0) is None:  # the default there
            del options["sp_size"]
        own = {name: options.pop(name) for name in signature(Settings).parameters if name in options}
        of_shards = {name: options.pop(name) for name in _OF_SHARDS if name in options}
        require_nothing_else(type(self), options, ELSEWHERE, {*signature(Settings).parameters, *_OF_SHARDS})
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
        name, chunks = STYLES["1f1b" if given.pp_size == 1 else given.pp_style]
        options = {"chunks": given.num_model_chunks} if chunks is None else {}
        return make_schedule(name, ranks=given.pp_size, microbatches=microbatches, **options)

    @property
    def tp_size(self) -> int:
        return self.context.tensor_size

    @property
    def pp_size(self) -> int:
        return self.context.pipeline_size

    @property
    def dp_size(self) -> int:
        return self.context.data_size

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """torch.distributed's group of the tensor ranks. All ranks get it together; likewise the groups below."""
        return self.context.mesh.get_group("tensor")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.context.mesh.get_group("pipeline")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.context.mesh.get_group("data")

    @property
    def pg_mesh(self) -> SimpleNamespace:
        """An object whose method `get_ranks_in_group` returns the ranks in the world of a group's members."""
        return SimpleNamespace(get_ranks_in_group=dist.get_process_group_ranks)

    @property
    def stage_manager(self) -> StageManager:
        return StageManager(self)

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


class TorchDDPPlugin(HybridParallelPlugin):
    """Replicas of the model. `Booster(mixed_precision=...)` sets their precision. `options` are those of
    HybridParallelPlugin; `precision` is "fp32" by default.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(1, 1, **{"precision": "fp32", **options})


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Replicas that distribute optimizer states, or with stage 2 also gradients.

    Args:
        stage: 1 or 2.
        options: those of HybridParallelPlugin.

    Raises UsageError for another stage, and as HybridParallelPlugin does.
    """

    def __init__(self, stage: int = 1, **options: Any) -> None:
        if stage not in (1, 2):
            raise UsageError(f"stage must be 1 or 2, got {stage}: use TorchDDPPlugin for 0, GeminiDDP for 3")
        super().__init__(1, 1, zero_stage=stage, **options)


def GeminiPlugin(**options: Any) -> NoReturn:  # noqa: N802  # its name there
    """Raises UsageError: this plugin is not supported."""
    raise UsageError(
        "GeminiPlugin is not supported: wrap the model with colossalai.nn.parallel.GeminiDDP, without a Booster, "
        "or use LowLevelZeroPlugin(stage=2)"
    )


class StageManager:
    """The place of this rank in the pipeline, and the layers of its stages. In ColossalAI, a stage is a pipeline rank.

    Attributes:
        num_stages: number of pipeline ranks.
        stage: index of this rank.
        num_model_chunks: number of stages per rank.
        num_layers_per_stage: number of layers of each stage, if the plugin has it.
    """

    def __init__(self, plugin: HybridParallelPlugin) -> None:
        self._placement = plugin.placement
        self.num_stages = plugin.pp_size
        self.stage = plugin.context.pipeline_rank
        self.num_model_chunks = self._placement.num_stages // self.num_stages
        self.num_layers_per_stage = plugin.settings.num_layers_per_stage

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:
        """True if this rank has the model's first block."""
        return self.stage in self._placement.ranks_of(0)

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """True if this rank has the loss and the outputs."""
        return self.stage in self._placement.ranks_of(self._placement.num_stages - 1)

    def distribute_layers(self, num_layers: int) -> list[int]:
        """Returns the number of layers of each stage, in the order of stages: `num_layers_per_stage`, else equal
        numbers, where stages in the middle get one more if there is a remainder. Raises UsageError for another number
        of layers.
        """
        if self.num_layers_per_stage is not None:
            if sum(self.num_layers_per_stage) != num_layers:
                raise UsageError(
                    f"num_layers_per_stage is for {sum(self.num_layers_per_stage)} layers, not {num_layers}"
                )
            return list(self.num_layers_per_stage)
        stages = self._placement.num_stages
        each, more = divmod(num_layers, stages)
        start = stages // 2 - more // 2
        return [each + (start <= stage < start + more) for stage in range(stages)]

    def get_stage_index(
        self, layers_per_stage: Sequence[int], stage: int | None = None
    ) -> tuple[int, int] | list[tuple[int, int]]:
        """Returns the first layer of a rank's stage and the one after its last; a list of them for several stages.

        Args:
            layers_per_stage: as `distribute_layers` returns it.
            stage: index of the rank; by default this one.
        """
        ends = [0, *accumulate(layers_per_stage)]
        own = self._placement.stages_of(self.stage if stage is None else stage)
        found = [(ends[each], ends[each + 1]) for each in own]
        return found[0] if len(found) == 1 else found
