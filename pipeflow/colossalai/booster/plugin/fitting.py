"""Settings that only some layouts and devices can have."""

from __future__ import annotations

from pipeflow.colossalai.booster.plugin.settings import Settings
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context


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
