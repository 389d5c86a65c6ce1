"""ColossalAI's `colossalai.registry`. LAYERS has torch.nn's classes, too."""

from __future__ import annotations

from torch import nn

from pipeflow.training.registry import Registry

__all__ = ["LAYERS", "MODELS", "Registry"]

LAYERS = Registry("LAYERS", [nn])
MODELS = Registry("MODELS")
