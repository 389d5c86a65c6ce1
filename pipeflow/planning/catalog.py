"""Catalog: all models that have a name. Must not contain: their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pipeflow.core.errors import unknown
from pipeflow.planning.transformer import GPT, GPT_PRESETS
from pipeflow.planning.vit import VIT_PRESETS, ViT

Model = GPT | ViT
MODELS: Mapping[str, Model] = MappingProxyType({**GPT_PRESETS, **VIT_PRESETS})
"""The models of GPT_PRESETS and of VIT_PRESETS."""


def model_named(name: str) -> Model:
    """The model `name` of MODELS. Raises UsageError for an unknown name, with the nearest known one.

    >>> model_named("vit-b16").tokens
    197
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]
