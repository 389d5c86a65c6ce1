"""`model_zoo.vit` of ColossalAI's tutorials: the vision transformer of `vit`. It has all presets of `vit.build`."""

from __future__ import annotations

from model_zoo.vit.vit import __getattr__
from vit.mixup import MixupAccuracy, MixupLoss

__all__ = ["MixupAccuracy", "MixupLoss", "__getattr__"]
