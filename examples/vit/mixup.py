"""Mixup with its loss and accuracy, from `pipeflow.training.data.mixup`."""

from __future__ import annotations

from pipeflow.training.data.mixup import MixedLabels, Mixup, MixupAccuracy, MixupLoss

__all__ = ["MixedLabels", "Mixup", "MixupAccuracy", "MixupLoss"]
