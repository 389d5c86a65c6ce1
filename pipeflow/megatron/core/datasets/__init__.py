"""Megatron-LM's `megatron.core.datasets`."""
