"""`model_zoo.vit` of ColossalAI's tutorials: the vision transformer of `vit`."""

from __future__ import annotations

from vit.build import vit_base_patch16_224
from vit.mixup import MixupAccuracy, MixupLoss

__all__ = ["MixupAccuracy", "MixupLoss", "vit_base_patch16_224"]
