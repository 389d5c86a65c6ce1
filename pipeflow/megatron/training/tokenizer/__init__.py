"""Megatron-LM's `megatron.training.tokenizer`."""
