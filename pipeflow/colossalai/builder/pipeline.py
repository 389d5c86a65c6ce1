"""ColossalAI's `colossalai.builder.pipeline`."""

from __future__ import annotations

from pipeflow.planning.partition import partition_balanced, partition_uniform

__all__ = ["partition_balanced", "partition_uniform"]
