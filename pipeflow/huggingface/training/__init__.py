"""transformers' Trainer for a Pipeline."""
