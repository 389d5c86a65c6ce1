"""ColossalAI's hook of learning rates."""

from __future__ import annotations

import pipeflow.training as native
from pipeflow.training.engine import Scheduler


class LRSchedulerHook(native.RateHook):
    """pipeflow's RateHook. The rate is always shown, whatever `store_lr_in_state` says."""

    def __init__(
        self, lr_scheduler: Scheduler, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(lr_scheduler, by_epoch=by_epoch)
        self.priority = priority
