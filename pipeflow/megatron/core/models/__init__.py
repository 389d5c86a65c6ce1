"""Megatron-LM's `megatron.core.models`."""
