"""Megatron-LM's `megatron.core`."""

from __future__ import annotations

from pipeflow.megatron.core import parallel_state, tensor_parallel

mpu = parallel_state  # its older name

__all__ = ["mpu", "parallel_state", "tensor_parallel"]
