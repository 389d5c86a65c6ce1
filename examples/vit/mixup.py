"""Mixup with its loss and accuracy, from `pipeflow.training`."""

from __future__ import annotations

from pipeflow.training import MixedLabels, Mixup, MixupAccuracy, MixupLoss

__all__ = ["MixedLabels", "Mixup", "MixupAccuracy", "MixupLoss"]
