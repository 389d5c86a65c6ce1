"""Metrics of an evaluation, computed on the ranks with the outputs, over all replicas, and sent to every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.agreement import all_gather, gather_rows
from pipeflow.engine.runtime.step import Output
from pipeflow.training.trainer import Hook, Trainer


class MetricHook(Hook):
    """Reports a metric of each evaluation.

    Args:
        name: its name in `trainer.metrics["test"]`.
        metric: a metric of torchmetrics, or an object with `update(outputs, labels)`, `compute()` and `reset()`.
            Metrics of torchmetrics are synchronized over the replicas; others are computed from one replica's data.

    Raises UsageError for an object that lacks one of these methods.
    """

    priority = 20
    needs_outputs = frozenset({"test"})

    def __init__(self, name: str, metric: Any) -> None:
        if missing := [method for method in ("update", "compute", "reset") if not hasattr(metric, method)]:
            raise UsageError(
                f"metric {name!r} is a {type(metric).__name__} and has no {missing[0]}(): see torchmetrics"
            )
        self.name = name
        self.metric = metric

    def before_evaluation(self, trainer: Trainer) -> None:
        self.metric.reset()
        if hasattr(self.metric, "dist_sync_fn"):  # torchmetrics'
            context = trainer.engine.model.context
            self.metric.to(context.device)
            self.metric.dist_sync_fn = lambda tensor, group=None: gather_rows(context.data, tensor)
            self.metric.distributed_available_fn = lambda: context.data.size > 1

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        if output.outputs is not None:
            self.metric.update(output.outputs, labels)

    def after_evaluation(self, trainer: Trainer) -> None:
        with trainer.engine.model.context.alarm.raised_everywhere():  # replicas wait for each other within
            value = self._value() if trainer.has_last_stage else math.nan
        trainer.metrics["test"][self.name] = trainer.told_by_last_stage(value)

    def _value(self) -> float:
        value = self.metric.compute()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"metric {self.name!r} must be one number, got {value!r}: give each number its own MetricHook, or "
                "choose how they are averaged"
            ) from None


class AccuracyHook(Hook):
    """Reports the metric "accuracy" of each evaluation: the fraction of correct answers.

    Args:
        count_right: `count_right(outputs, labels)` returns the number of correct answers in a batch. By default an
            answer is correct if its label has the largest score.
    """

    priority = 20
    needs_outputs = frozenset({"test"})

    def __init__(self, count_right: Callable[[Any, Any], Tensor | float] | None = None) -> None:
        self.count_right = _count_right if count_right is None else count_right
        self._right = self._samples = 0.0

    def before_evaluation(self, trainer: Trainer) -> None:
        self._right = self._samples = 0.0

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        self._samples += output.samples
        if output.outputs is not None:
            self._right += float(self.count_right(output.outputs, labels))

    def after_evaluation(self, trainer: Trainer) -> None:
        context = trainer.engine.model.context
        with context.alarm.raised_everywhere():
            rows = all_gather(context.world, [self._right])
        size = len(rows) // context.data_size
        replicas = [rows[first : first + size] for first in range(0, len(rows), size)]
        right = sum(max(count for [count] in replica) for replica in replicas)
        trainer.metrics["test"]["accuracy"] = right / self._samples if self._samples else math.nan


def _count_right(outputs: Any, labels: Any) -> Tensor | float:
    return float((outputs.argmax(dim=-1) == labels.to(outputs.device)).sum())
