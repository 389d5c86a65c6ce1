"""Wrappers of torch's optimizers (sharded states, float32 masters, loss scaling), gradient clipping, and an optimizer
and learning-rate schedules that torch lacks.
"""

from __future__ import annotations

from pipeflow.optim.clip import clip_grad_norm_, grad_norm
from pipeflow.optim.lamb import Lamb
from pipeflow.optim.masters import MasterWeights
from pipeflow.optim.optimizer import load_named_state, named_state
from pipeflow.optim.pipelined import PipelinedOptimizer
from pipeflow.optim.precision import HalfPrecision
from pipeflow.optim.rates import (
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepWarmupLR,
    PolynomialWarmupLR,
)
from pipeflow.optim.scaler import LossScaler
from pipeflow.optim.zero import Zero

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
