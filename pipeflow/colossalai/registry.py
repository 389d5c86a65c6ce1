"""ColossalAI's `colossalai.registry`. LAYERS also has torch.nn's classes."""

from __future__ import annotations

from torch import nn

from pipeflow.training.registry import Registry

__all__ = ["LAYERS", "MODELS", "Registry"]

LAYERS = Registry("LAYERS", [nn])
MODELS = Registry("MODELS")
