"""Training on top of the engine: precision, optimizers, clipping, checkpoints, data."""
