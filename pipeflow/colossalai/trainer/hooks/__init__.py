"""ColossalAI's `colossalai.trainer.hooks`."""

from __future__ import annotations

from pipeflow.colossalai.trainer.hooks.base import BaseHook
from pipeflow.colossalai.trainer.hooks.metrics import AccuracyHook, LossHook
from pipeflow.colossalai.trainer.hooks.rates import LRSchedulerHook

__all__ = ["AccuracyHook", "BaseHook", "LRSchedulerHook", "LossHook"]
