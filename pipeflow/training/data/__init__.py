"""Data for training: each replica's part of it, and mixup."""
