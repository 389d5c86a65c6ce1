"""ColossalAI's `colossalai.registry`. LAYERS and LOSSES also have torch.nn's classes, OPTIMIZERS torch.optim's, and
HOOKS those of `colossalai.trainer.hooks`.
"""

from __future__ import annotations

from torch import nn, optim

from pipeflow.colossalai.trainer import hooks
from pipeflow.training.registry import Registry

__all__ = ["DATASETS", "HOOKS", "LAYERS", "LOSSES", "MODELS", "OPTIMIZERS", "Registry"]

DATASETS = Registry("DATASETS")
HOOKS = Registry("HOOKS", [hooks])
LAYERS = Registry("LAYERS", [nn])
LOSSES = Registry("LOSSES", [nn])
MODELS = Registry("MODELS")
OPTIMIZERS = Registry("OPTIMIZERS", [optim])
