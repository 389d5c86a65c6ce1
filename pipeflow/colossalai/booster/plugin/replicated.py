"""ColossalAI's plugins for replicas of a whole model: HybridParallelPlugin with one pipeline and one tensor rank."""

from __future__ import annotations

from typing import Any

from pipeflow.colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin
from pipeflow.colossalai.options import Elsewhere, require_nothing_else
from pipeflow.core.errors import UsageError

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
    """Not supported. Raises UsageError."""

    def __init__(self, **options: Any) -> None:
        raise UsageError(
            "GeminiPlugin is not supported: wrap the model with colossalai.nn.parallel.GeminiDDP, without a Booster, "
            "or use LowLevelZeroPlugin(stage=2)"
        )
