"""ColossalAI's hooks of rates: of learning, and of training."""

from __future__ import annotations

import pipeflow.training as native
from pipeflow.core.errors import UsageError
from pipeflow.training import Step
from pipeflow.training.engine import Scheduler


class LRSchedulerHook(native.RateHook):
    """pipeflow's RateHook. The rate is always kept, whatever `store_lr_in_state` says."""

    def __init__(
        self, lr_scheduler: Scheduler, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(lr_scheduler, by_epoch=by_epoch)
        self.priority = priority


class ThroughputHook(native.ThroughputHook):
    """pipeflow's ThroughputHook, of the whole job.

    Args:
        ignored_steps: so many steps at the start are not counted.
        tflop_per_step: 10^12 floating-point operations that a step of the whole job takes, 0 where it is not known.
        use_local: must be False: replicas train in step.

    Raises UsageError for use_local=True, and as pipeflow's.
    """

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        if use_local:
            raise UsageError("ThroughputHook counts the samples of all replicas: leave use_local out")
        super().__init__(ignored_steps=ignored_steps)
        self.priority = priority
        self.tflop_per_step = tflop_per_step

    def after_step(self, trainer: native.Trainer, step: Step) -> None:
        self.flops_per_sample = self.tflop_per_step * 1e12 / step.samples
        super().after_step(trainer, step)
