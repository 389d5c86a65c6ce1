"""`model_zoo.vit.vit` of ColossalAI's tutorials: the parts of the vision transformer of `vit`."""

from __future__ import annotations

from vit.build import build_stage as _create_vit_model
from vit.model import ViTBlock, ViTEmbedding, ViTHead

__all__ = ["ViTBlock", "ViTEmbedding", "ViTHead", "_create_vit_model"]
