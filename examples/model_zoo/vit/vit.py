"""`model_zoo.vit.vit` of ColossalAI's tutorials: the parts of the vision transformer of `vit`, and its presets."""

from __future__ import annotations

from vit.build import PRESETS, Preset
from vit.build import build_stage as _create_vit_model
from vit.model import ViTBlock, ViTEmbedding, ViTHead

__all__ = ["ViTBlock", "ViTEmbedding", "ViTHead", "__getattr__", "_create_vit_model"]


def __getattr__(name: str) -> Preset:
    """Returns a preset, such as `vit_large_patch16_224`."""
    if name not in PRESETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its presets are {', '.join(PRESETS)}")
    return PRESETS[name]
