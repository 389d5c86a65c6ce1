"""What steps the parameters, around torch's optimizers: sharded states, float32 masters, loss scaling, clipping."""

from __future__ import annotations

from pipeflow.optim.clip import clip_grad_norm_, grad_norm
from pipeflow.optim.masters import MasterWeights
from pipeflow.optim.optimizer import load_named_state, named_state
from pipeflow.optim.precision import HalfPrecision
from pipeflow.optim.scaler import LossScaler
from pipeflow.optim.zero import Zero

__all__ = [
    "HalfPrecision",
    "LossScaler",
    "MasterWeights",
    "Zero",
    "clip_grad_norm_",
    "grad_norm",
    "load_named_state",
    "named_state",
]
