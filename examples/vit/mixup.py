"""Mixup, and its loss and accuracy: those of `pipeflow.training.mixup`."""

from __future__ import annotations

from pipeflow.training.mixup import MixedLabels, Mixup, MixupAccuracy, MixupLoss

__all__ = ["MixedLabels", "Mixup", "MixupAccuracy", "MixupLoss"]
