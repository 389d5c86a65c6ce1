"""ColossalAI's hooks for metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

import pipeflow.training as native
from pipeflow.runtime.step import Output
from pipeflow.training import Hook


class LossHook(Hook):
    """Does nothing: a trainer stores the losses of steps, epochs and evaluations itself."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority


class AccuracyHook(native.AccuracyHook):
    """pipeflow's AccuracyHook; `accuracy_func(outputs, labels)` returns the number of correct answers in a batch."""

    def __init__(self, accuracy_func: Callable[[Any, Any], Tensor | float], priority: int = 0) -> None:
        super().__init__(accuracy_func)
        self.priority = priority

    def after_batch(self, trainer: native.Trainer, output: Output, labels: object) -> None:
        device = trainer.engine.model.context.device
        there = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, labels)
        super().after_batch(trainer, output, there)
