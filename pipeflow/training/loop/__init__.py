"""The loop of training: an Engine takes steps, a Trainer runs epochs and calls its hooks."""
