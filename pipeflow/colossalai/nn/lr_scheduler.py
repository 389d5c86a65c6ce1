"""ColossalAI's `colossalai.nn.lr_scheduler`: pipeflow's schedules, and torch's with an argument `total_steps`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from pipeflow.optim.rates import (
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepWarmupLR,
    PolynomialWarmupLR,
)

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]

Factor = Callable[[int], float]


def CosineAnnealingLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1
) -> lr_scheduler.CosineAnnealingLR:
    """Makes torch's CosineAnnealingLR with T_max=total_steps."""
    return lr_scheduler.CosineAnnealingLR(optimizer, total_steps, eta_min, last_epoch)


def PolynomialLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, end_lr: float = 0.0001, power: float = 1.0, last_epoch: int = -1
) -> PolynomialWarmupLR:
    """Makes a PolynomialWarmupLR without a warm-up, since torch's PolynomialLR has no `end_lr`."""
    return PolynomialWarmupLR(optimizer, total_steps, 0, end_lr, power, last_epoch)


def OneCycleLR(optimizer: Optimizer, total_steps: int, **options: Any) -> lr_scheduler.OneCycleLR:  # noqa: N802  # its name there
    """Makes torch's OneCycleLR with the groups' rates as `max_lr`."""
    return lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps, **options)


def MultiStepLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
) -> lr_scheduler.MultiStepLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.MultiStepLR(optimizer, milestones, gamma, last_epoch)


def StepLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
) -> lr_scheduler.StepLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.StepLR(optimizer, step_size, gamma, last_epoch)


def ExponentialLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1
) -> lr_scheduler.ExponentialLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.ExponentialLR(optimizer, gamma, last_epoch)


def LambdaLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, lr_lambda: Factor | list[Factor], last_epoch: int = -1
) -> lr_scheduler.LambdaLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.LambdaLR(optimizer, lr_lambda, last_epoch)


def MultiplicativeLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, lr_lambda: Factor | list[Factor], last_epoch: int = -1
) -> lr_scheduler.MultiplicativeLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.MultiplicativeLR(optimizer, lr_lambda, last_epoch)
