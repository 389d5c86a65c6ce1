"""Catalog: all models that have a name. Must not contain: their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pipeflow.core.errors import UsageError, require_type, unknown
from pipeflow.planning.presets import GPT_PRESETS
from pipeflow.planning.transformer import GPT, ViT

Model = GPT | ViT
_BASE, _LARGE, _HUGE = (12, 768, 12), (24, 1024, 16), (32, 1280, 16)
VIT_PRESETS: Mapping[str, ViT] = MappingProxyType(
    {
        "vit-b16": ViT(*_BASE),
        "vit-b32": ViT(*_BASE, patch=32),
        "vit-l16": ViT(*_LARGE),
        "vit-l32": ViT(*_LARGE, patch=32),
        "vit-h14": ViT(*_HUGE, patch=14),
    }
)
"""Models by name, for images of 224 x 224 and the 1000 classes of ImageNet."""

MODELS: Mapping[str, Model] = MappingProxyType({**GPT_PRESETS, **VIT_PRESETS})
"""The models of GPT_PRESETS and of VIT_PRESETS."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "qwen3-next": "three of four layers have linear attention (Gated DeltaNet)",
        "kimi-linear": "three of four layers have linear attention",
        "minimax-text": "seven of eight layers have linear attention",
        "rwkv": "its layers have no attention",
    }
)
"""By the beginning of a name: why models that are called so cannot be planned."""


OTHER_NAMES: Mapping[str, str] = MappingProxyType({"gpt2": "'gpt2-small'"})
"""What is meant by names of Hugging Face, for `pipeflow.core.errors.unknown`."""


def model_named(name: str) -> Model:
    """The model `name` of MODELS. Raises UsageError for an unknown name, with the nearest known one, and for a model
    that cannot be planned, with the reason.

    >>> model_named("vit-b16").tokens
    197
    """
    require_type("name", name, str)
    for start, why in REFUSED.items():
        if name.lower().startswith(start):
            raise UsageError(f"{name} cannot be planned: {why}. A plan counts attention, scans (Mamba) and MLPs alone")
    if name not in MODELS:
        raise unknown("model", name.rpartition("/")[2].lower(), MODELS, OTHER_NAMES)
    return MODELS[name]
