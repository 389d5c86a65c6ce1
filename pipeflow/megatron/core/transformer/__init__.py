"""Megatron-LM's `megatron.core.transformer`."""
