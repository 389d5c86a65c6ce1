"""MemoryHook: the memory that ranks use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.training.engine import Step
from pipeflow.training.trainer import Hook, Trainer

GIB = 2**30
_STATM = Path("/proc/self/statm")


class MemoryHook(Hook):
    """Reports the metric "memory GiB", the memory of the rank that uses most. On an accelerator it is the peak that
    torch allocated since the epoch began, on CPUs the process's current resident memory. It is measured after each
    epoch and every `every`-th step.

    Args:
        every: number of steps between two measurements.

    Attributes:
        by_rank: GiB of each rank at the last measurement.

    Raises UsageError if `every` is less than 1.
    """

    priority = 15

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise UsageError(f"every must be at least 1, got {every}")
        self.every = every
        self.by_rank: list[float] = []

    def before_epoch(self, trainer: Trainer) -> None:
        device = trainer.engine.model.context.device
        if _is_accelerator(device):
            torch.accelerator.reset_peak_memory_stats(device)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if (trainer.step_in_epoch - 2) % self.every == 0:
            trainer.step_metrics["memory GiB"] = self._largest(trainer)

    def after_training(self, trainer: Trainer) -> None:
        trainer.metrics["train"]["memory GiB"] = self._largest(trainer)

    def _largest(self, trainer: Trainer) -> float:
        context = trainer.engine.model.context
        with context.alarm.raised_everywhere():
            rows = all_gather(context.world, [memory_of(context.device)])
        self.by_rank = [held / GIB for [held] in rows]
        return max(self.by_rank)


def memory_of(device: torch.device) -> int:
    """Bytes in use: on an accelerator the peak that torch allocated; elsewhere the resident memory of this process, or
    its peak on systems that report only that.
    """
    if _is_accelerator(device):
        return int(torch.accelerator.max_memory_allocated(device))
    if _STATM.exists():
        return int(_STATM.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _is_accelerator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")
