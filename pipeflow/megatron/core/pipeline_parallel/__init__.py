"""Megatron-LM's `megatron.core.pipeline_parallel`."""

from __future__ import annotations

from pipeflow.megatron.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
