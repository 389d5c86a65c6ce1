"""Megatron-LM's `megatron.core.distributed`."""

from __future__ import annotations

from pipeflow.megatron.core.distributed.distributed_data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig"]
