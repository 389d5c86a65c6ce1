"""Learning-rate schedules that torch.optim.lr_scheduler lacks: a linear warm-up, then a decay, as closed forms of the
step t = `last_epoch`, with T = `total_steps` and w = `warmup_steps`. Steps may be optimizer steps or epochs.

Each is one of torch's LRSchedulers: it sets the rate of every parameter group from the group's own base rate, and its
`state_dict` resumes it. After step T the rate stays constant.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeflow.core.errors import UsageError, numbers_of
from pipeflow.core.placement import require_at_least

Rate = float | Tensor


class Scheduler(Protocol):
    """A learning-rate scheduler, such as torch's."""

    def step(self) -> None:
        """Sets the learning rate of the next step or epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's state in plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""


class WarmupLR(LRScheduler, ABC):
    """Base class of the schedules here: the base rate times (t + 1) / w while t < w, then `decayed`. If w is T or more,
    training ends within the warm-up.

    Args:
        optimizer: the optimizer whose rates are set.
        total_steps: T, number of steps of the whole training.
        warmup_steps: w, number of steps of the warm-up; 0 for none.
        last_epoch: index of the last step before resuming; -1 at the start.

    Raises UsageError if `total_steps` is less than 1 or `warmup_steps` is negative.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        require_at_least(1, total_steps=total_steps)
        require_at_least(0, warmup_steps=warmup_steps)
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Rate]:
        """Returns the rate of every group at `last_epoch`."""
        step = min(self.last_epoch, self.total_steps)
        if step < self.warmup_steps:
            return [base * self.warmed(step) for base in self.base_lrs]
        return [self.decayed(base, step) for base in self.base_lrs]

    _get_closed_form_lr = get_lr  # torch's name, for `step(epoch)`

    def warmed(self, step: int) -> float:
        """Returns the factor of the base rate while `step` < w."""
        return (step + 1) / self.warmup_steps

    @abstractmethod
    def decayed(self, base: Rate, step: int) -> Rate:
        """Returns the rate at a `step` from w to T."""

    def _left(self, step: int, start: int) -> float:
        """The fraction of the steps from `start` to T that remains at `step`; 1 if there are none."""
        return (self.total_steps - step) / (self.total_steps - start) if start < self.total_steps else 1.0


class LinearWarmupLR(WarmupLR):
    """Linear warm-up and decay: the base rate times (t + 1) / (w + 1) while t < w, then times (T - t) / (T - w), which
    is 0 at T.

    Args:
        optimizer: the optimizer whose rates are set.
        total_steps: T, number of steps of the whole training.
        warmup_steps: w, number of steps of the warm-up; 0 for none.
        last_epoch: index of the last step before resuming; -1 at the start.

    >>> from torch import nn, optim
    >>> optimizer = optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    >>> scheduler, rates = LinearWarmupLR(optimizer, total_steps=4, warmup_steps=2), []
    >>> for _ in range(6):
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step(), scheduler.step()  # doctest: +ELLIPSIS
    (...)
    >>> rates
    [0.333, 0.667, 1.0, 0.5, 0.0, 0.0]
    """

    def warmed(self, step: int) -> float:
        """Returns (t + 1) / (w + 1), so the first step of the decay has the base rate."""
        return (step + 1) / (self.warmup_steps + 1)

    def decayed(self, base: Rate, step: int) -> Rate:
        return base * self._left(step, self.warmup_steps)


class PolynomialWarmupLR(WarmupLR):
    """Polynomial decay after a linear warm-up: end_lr + (base - end_lr) * ((T - t) / (T - w)) ** power.

    Args:
        optimizer, total_steps, warmup_steps, last_epoch: as in LinearWarmupLR.
        end_lr: the rate at T.
        power: exponent of the decay; 1 is linear.

    Raises UsageError if `end_lr` is negative or `power` is not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        _require(end_lr >= 0, "end_lr", "a rate of at least 0", end_lr)
        _require(power > 0, "power", "positive", power)
        self.end_lr = end_lr
        self.power = power
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def decayed(self, base: Rate, step: int) -> Rate:
        return self.end_lr + (base - self.end_lr) * math.pow(self._left(step, self.warmup_steps), self.power)


class FlatAnnealingWarmupLR(WarmupLR):
    """After a linear warm-up, a constant rate, then half a cosine down to `eta_min` at T.

    Args:
        optimizer, total_steps, warmup_steps, last_epoch: as in LinearWarmupLR.
        pct_start: fraction of the steps after the warm-up that keep the base rate, from 0 to 1; 1 never decays.
        eta_min: the rate at T.

    Raises UsageError if `pct_start` is not from 0 to 1 or `eta_min` is negative.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _require(0 <= pct_start <= 1, "pct_start", "a fraction of the steps, from 0 to 1", pct_start)
        _require(eta_min >= 0, "eta_min", "a rate of at least 0", eta_min)
        self.pct_start = pct_start
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def decayed(self, base: Rate, step: int) -> Rate:
        start = self.warmup_steps + int((self.total_steps - self.warmup_steps) * self.pct_start)
        left = self._left(max(step, start), start)
        return self.eta_min + (base - self.eta_min) * (1 - math.cos(math.pi * left)) / 2


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """FlatAnnealingWarmupLR without a warm-up, down to 0 at T.

    Args:
        optimizer, total_steps, pct_start, last_epoch: as in FlatAnnealingWarmupLR.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(FlatAnnealingWarmupLR):
    """After a linear warm-up, half a cosine from the base rate to `eta_min` at T (Loshchilov and Hutter, 2017,
    arXiv:1608.03983, without restarts). Unlike torch's CosineAnnealingLR, the rate does not rise again after T.

    Args:
        optimizer, total_steps, warmup_steps, last_epoch: as in LinearWarmupLR.
        eta_min: the rate at T.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, 0.0, eta_min, last_epoch)


class MultiStepWarmupLR(WarmupLR):
    """After a linear warm-up, the base rate, multiplied by `gamma` at each milestone.

    Args:
        optimizer, total_steps, warmup_steps, last_epoch: as in LinearWarmupLR.
        milestones: steps at which the rate falls, counted from the start of the warm-up; those after T have no effect.
        gamma: factor of the rate at a milestone.

    Raises UsageError if there are no milestones, or if one lies in the warm-up.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.milestones = [*numbers_of("milestones", milestones)]
        fits = len(self.milestones) > 0 and min(self.milestones) >= warmup_steps
        what = f"a list of steps such as [30, 60], none before warmup_steps={warmup_steps}"
        _require(fits, "milestones", what, milestones)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def decayed(self, base: Rate, step: int) -> Rate:
        reached = sum(milestone <= step for milestone in self.milestones)
        return base * self.gamma**reached


def _require(fits: bool, name: str, what: str, value: object) -> None:
    if not fits:
        raise UsageError(f"{name} must be {what}, got {value!r}")
