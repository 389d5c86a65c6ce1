"""Megatron-LM's `megatron.core`."""
