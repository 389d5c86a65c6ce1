"""Learning-rate schedules that torch.optim.lr_scheduler lacks: a linear warm-up, then a decay, as closed forms of the
step t = `last_epoch`. With T = `total_steps` and w = `warmup_steps`, what is counted may be steps or epochs alike.

Each is an LRScheduler of torch's: a rate per group of the optimizer, from that group's own base rate, and a
`state_dict` that goes on where it was. From T on the rate stays as it is at T, however many steps follow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_at_least

Rate = float | Tensor


class WarmupLR(LRScheduler, ABC):
    """Base of the schedules here: the base rate times (t + 1) / w while t < w, then `decayed`.

    Where w is T or more, training ends within the warm-up.

    Raises UsageError for a `total_steps` below 1, and for a negative warm-up.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        require_at_least(1, total_steps=total_steps)
        require_at_least(0, warmup_steps=warmup_steps)
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Rate]:
        """The rate of every group at `last_epoch`."""
        step = min(self.last_epoch, self.total_steps)
        if step < self.warmup_steps:
            return [base * self.warmed(step) for base in self.base_lrs]
        return [self.decayed(base, step) for base in self.base_lrs]

    _get_closed_form_lr = get_lr  # torch's name, for `step(epoch)`

    def warmed(self, step: int) -> float:
        """The factor of the base rate while `step` < w."""
        return (step + 1) / self.warmup_steps

    @abstractmethod
    def decayed(self, base: Rate, step: int) -> Rate:
        """The rate at a `step` from w to T."""

    def _left(self, step: int, start: int) -> float:
        """How much of the way from `start` to T is left at `step`; all of it where there is no way."""
        return (self.total_steps - step) / (self.total_steps - start) if start < self.total_steps else 1.0


class LinearWarmupLR(WarmupLR):
    """Base rate times (t + 1) / (w + 1) while t < w, then times (T - t) / (T - w), down to 0 at T.

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
        """(t + 1) / (w + 1): the peak is the first step of the decay."""
        return (step + 1) / (self.warmup_steps + 1)

    def decayed(self, base: Rate, step: int) -> Rate:
        return base * self._left(step, self.warmup_steps)


class PolynomialWarmupLR(WarmupLR):
    """After the warm-up, from the base rate to `end_lr` at T: end_lr + (base - end_lr) * ((T - t) / (T - w)) ** power.

    Raises UsageError for a negative `end_lr`, and for a `power` that is not positive.
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
    """After the warm-up, the base rate for `pct_start` of the steps that are left (rounded down), then a cosine from it
    to `eta_min` at T. With pct_start=1 the rate stays flat.

    Raises UsageError for a `pct_start` that is not from 0 to 1, and for a negative `eta_min`.
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
        _require(0 <= pct_start <= 1, "pct_start", "a part of the steps, from 0 to 1", pct_start)
        _require(eta_min >= 0, "eta_min", "a rate of at least 0", eta_min)
        self.pct_start = pct_start
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def decayed(self, base: Rate, step: int) -> Rate:
        start = self.warmup_steps + int((self.total_steps - self.warmup_steps) * self.pct_start)
        left = self._left(max(step, start), start)
        return self.eta_min + (base - self.eta_min) * (1 - math.cos(math.pi * left)) / 2


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """FlatAnnealingWarmupLR without a warm-up, down to 0."""

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(FlatAnnealingWarmupLR):
    """After the warm-up, half a cosine from the base rate to `eta_min` at T (Loshchilov and Hutter, 2017,
    arXiv:1608.03983, without restarts). torch's CosineAnnealingLR rises again after its end; this one stays.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, 0.0, eta_min, last_epoch)


class MultiStepWarmupLR(WarmupLR):
    """After the warm-up, the base rate times `gamma` to the power of how many `milestones` were reached. These are
    counted from the start of training, the warm-up included; those after T are never reached.

    Raises UsageError where there are no milestones, or one lies in the warm-up.
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
        fits = len(milestones) > 0 and min(milestones) >= warmup_steps
        what = f"the steps at which the rate falls, none before warmup_steps={warmup_steps}, such as [30, 60]"
        _require(fits, "milestones", what, milestones)
        self.milestones = list(milestones)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def decayed(self, base: Rate, step: int) -> Rate:
        reached = sum(milestone <= step for milestone in self.milestones)
        return base * self.gamma**reached


def _require(fits: bool, name: str, what: str, value: object) -> None:
    if not fits:
        raise UsageError(f"{name} must be {what}, got {value!r}")
