"""Wrappers of torch's optimizers (sharded states, float32 masters, loss scaling), gradient clipping, and an optimizer
and learning-rate schedules that torch lacks.
"""

from __future__ import annotations

from pipeflow.training.optim.clip import clip_grad_norm_, grad_norm
from pipeflow.training.optim.lamb import Lamb
from pipeflow.training.optim.optimizer import load_named_state, named_state
from pipeflow.training.optim.pipelined import PipelinedOptimizer
from pipeflow.training.optim.precision import HalfPrecision, LossScaler, MasterWeights
from pipeflow.training.optim.rates import (
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepWarmupLR,
    PolynomialWarmupLR,
)
from pipeflow.training.optim.zero import Zero

__all__ = [
    "CosineAnnealingWarmupLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "HalfPrecision",
    "Lamb",
    "LinearWarmupLR",
    "LossScaler",
    "MasterWeights",
    "MultiStepWarmupLR",
    "PipelinedOptimizer",
    "PolynomialWarmupLR",
    "Zero",
    "clip_grad_norm_",
    "grad_norm",
    "load_named_state",
    "named_state",
]
