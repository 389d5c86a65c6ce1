"""Megatron-LM's `megatron.training`."""
