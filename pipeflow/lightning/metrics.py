"""Metrics of torchmetrics in a step: stages record with what they are called, and the module's own metrics get whole
batches, on every rank. Must not contain: what is logged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.core.module import Metric
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.huggingface.training.replicas import gathered
from pipeflow.parallel.context import Context

Calls = dict[str, dict[str, list[tuple[list[Any], dict[str, Any]]]]]
"""By the name of a metric and of its method: the arguments of each call."""


class Recorded(nn.Module):
    """Takes a metric's place in a step.

    Args:
        name: the metric's name in the module.
        calls: where calls are recorded.

    Attributes:
        value: stands for the value of a batch, which is known when the batch has run.
    """

    def __init__(self, name: str, calls: Calls) -> None:
        super().__init__()
        self.name, self._calls = name, calls
        self.value = torch.zeros(())

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Records a call. Returns what stands for its value."""
        self._record("forward", arguments, keywords)
        return self.value

    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Records a call without a value."""
        self._record("update", arguments, keywords)

    def compute(self) -> Tensor:
        """Raises UsageError: a stage has parts of batches."""
        raise UsageError(f"{self.name}.compute() was called in a step: log the metric, or call it at the epoch's end")

    def _record(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._calls.setdefault(self.name, {}).setdefault(method, []).append(([*arguments], keywords))


@contextmanager
def recording(module: nn.Module) -> Iterator[Calls]:
    """Inside the `with` block, calls of the metrics in `module` are recorded."""
    calls: Calls = {}
    places = [
        (owner, key, each, f"{prefix}.{key}" if prefix else key)
        for prefix, owner in module.named_modules()
        for key, each in owner._modules.items()
        if isinstance(each, Metric)
    ]
    for owner, key, _, name in places:
        owner._modules[key] = Recorded(name, calls)
    try:
        yield calls
    finally:
        for owner, key, each, _ in places:
            owner._modules[key] = each


def call_again(module: nn.Module, calls: Calls) -> dict[str, Any]:
    """Calls the module's metrics with whole batches. Returns their values, by name."""
    values = {}
    for name, methods in calls.items():
        metric = module.get_submodule(name)
        for method, made in methods.items():
            for arguments, keywords in made:
                values[name] = (metric if method == "forward" else metric.update)(*arguments, **keywords)  # type: ignore[operator]  # a metric's
    return values


def among_replicas(module: nn.Module, context: Context) -> None:
    """Makes the metrics of a module gather over replicas alone: ranks of a pipeline have the same states."""

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [*gathered(tensor[None], context)]

    for each in module.modules():
        if isinstance(each, Metric):
            each.to(context.device)
            each.dist_sync_fn = gather
            each.distributed_available_fn = lambda: context.data_size > 1
