"""ColossalAI's `colossalai.registry`."""

from __future__ import annotations

from pipeflow.training.registry import Registry

__all__ = ["LAYERS", "MODELS", "Registry"]

LAYERS = Registry("LAYERS")
MODELS = Registry("MODELS")
