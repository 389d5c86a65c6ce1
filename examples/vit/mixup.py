"""Mixup with its loss and accuracy, from `pipeflow.training.mixup`."""

from __future__ import annotations

from pipeflow.training.mixup import MixedLabels, Mixup, MixupAccuracy, MixupLoss

__all__ = ["MixedLabels", "Mixup", "MixupAccuracy", "MixupLoss"]
