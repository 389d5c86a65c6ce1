"""ColossalAI's hooks for learning rates and throughput."""

from __future__ import annotations

import pipeflow.training as native
from pipeflow.core.errors import UsageError
from pipeflow.training import Step
from pipeflow.training.engine import Scheduler


class LRSchedulerHook(native.RateHook):
    """pipeflow's RateHook. `store_lr_in_state` has no effect: the rate is always stored."""

    def __init__(
        self, lr_scheduler: Scheduler, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(lr_scheduler, by_epoch=by_epoch)
        self.priority = priority


class ThroughputHook(native.ThroughputHook):
    """pipeflow's ThroughputHook, for the whole job.

    Args:
        ignored_steps: number of steps at the start that are not counted.
        priority: as in BaseHook.
        tflop_per_step: floating-point operations of a step of the whole job, in units of 10^12; 0 if unknown.
        use_local: must be False, since the throughput is that of all replicas.

    Raises UsageError for use_local=True, and as pipeflow's hook does.
    """

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        if use_local:
            raise UsageError("ThroughputHook counts the samples of all replicas: remove use_local")
        super().__init__(ignored_steps=ignored_steps)
        self.priority = priority
        self.tflop_per_step = tflop_per_step

    def after_step(self, trainer: native.Trainer, step: Step) -> None:
        self.flops_per_sample = self.tflop_per_step * 1e12 / step.samples
        super().after_step(trainer, step)
