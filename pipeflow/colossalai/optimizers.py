"""ColossalAI's optimizers, learning-rate schedules and precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from torch.optim import Adam, AdamW, Optimizer, lr_scheduler

from pipeflow.optim.rates import PolynomialWarmupLR


class AMP_TYPE(StrEnum):  # noqa: N801  # its name in every tutorial
    """Ways to train a model in 16 bits; each is a mode of HalfPrecision."""

    NAIVE = "parameters"
    TORCH = "autocast"
    APEX = "apex"  # NVIDIA's, not supported


def HybridAdam(  # noqa: N802  # its name there
    model_params: Any, lr: float = 1e-3, *, weight_decay: float = 0.0, adamw_mode: bool = True, **options: Any
) -> Adam:
    """Makes torch's AdamW, or its Adam with `adamw_mode=False`. `options` are theirs."""
    return (AdamW if adamw_mode else Adam)(model_params, lr=lr, weight_decay=weight_decay, **options)


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
