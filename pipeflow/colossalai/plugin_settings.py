"""Settings: the options of ColossalAI's HybridParallelPlugin, checked, as a value; and those without effect here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from pipeflow.colossalai.options import Elsewhere
from pipeflow.colossalai.policies import Policy
from pipeflow.core.errors import UsageError
from pipeflow.optim.precision import HalfPrecision
from pipeflow.parallel.context import Context

Style = Literal["1f1b", "interleaved", "zbv"]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
_CHUNKS = {"1f1b": 1, "zbv": 2}
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
        enable_metadata_cache: has no effect: shapes are sent with every batch, and a header says if they are as before.

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
    pp_style: Style = "1f1b"
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
        if self.pp_style not in get_args(Style):
            raise UsageError(f"pp_style must be one of {', '.join(get_args(Style))}, got {self.pp_style!r}")
        chunks, given = _CHUNKS.get(self.pp_style), self.num_model_chunks
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
    "ddp_bucket_cap_mb": Elsewhere(25, _BUCKETS),
    "find_unused_parameters": Elsewhere(False, "parameters without a gradient are found automatically; remove it"),
    "check_reduction": Elsewhere(False, "every step checks it; remove it"),
    "gradient_as_bucket_view": Elsewhere(False, "leave it out"),
    "static_graph": Elsewhere(False, "leave it out"),
    "zero_bucket_size_in_m": Elsewhere(12, _BUCKETS),
    "communication_dtype": Elsewhere(None, "gradients are summed in their own dtype; remove it"),
    "overlap_communication": Elsewhere(True, "reductions always overlap computations; remove it"),
    "scheduler_nodes": Elsewhere(None, "pp_style='zbv' takes its order from pipeflow.make_schedule; remove it"),
    "gradient_checkpoint_config": Elsewhere(None, "call model.gradient_checkpointing_enable() before boost"),
    "overlap_allgather": Elsewhere(False, "leave it out"),
    "fp8_communication": Elsewhere(False, "tensors are sent in their own dtype; remove it"),
    "use_fp8": Elsewhere(False, "use precision='bf16'"),
    "inner_ring_size": Elsewhere(None, "there is no ring attention; remove it"),
}
"""Each with the value that has no effect, and what to do instead of another value."""
