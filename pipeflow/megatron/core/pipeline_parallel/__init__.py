"""Megatron-LM's `megatron.core.pipeline_parallel`."""
