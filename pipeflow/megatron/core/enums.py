"""Megatron-LM's `megatron.core.enums`."""

from __future__ import annotations

from enum import Enum


class ModelType(Enum):
    """Kinds of models. It has no effect: the layout decides which stages a model has."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4
