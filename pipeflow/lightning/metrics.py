"""Metrics of torchmetrics in a step: stages record with what they are called, and the module's own metrics get whole
batches, on every rank. Must not contain: what is logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.core.module import Metric, MetricCollection
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.trees import gathered

Calls = dict[str, dict[str, list[tuple[list[Any], dict[str, Any]]]]]
"""By the name of a metric and of its method: the arguments of each call."""


class Recorded(nn.Module):
    """Takes the place of a metric, or of a MetricCollection, in a step.

    Args:
        name: its name in the module.
        metric: the metric.

    Attributes:
        name: as given.
        calls: the arguments of each call, by method.
        value: stands for the value of a batch, which is known when the batch has run; of a collection, a dict.
        parts: what takes the place of a collection's metrics, by the names under which it logs them.
    """

    def __init__(self, name: str, metric: Any) -> None:
        super().__init__()
        self.name = name
        self.calls: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {}
        self.parts: dict[str, Recorded] = {}
        self.value: Any = torch.zeros(())
        if isinstance(metric, MetricCollection):
            pairs = zip(metric.keys(), metric.items(keep_base=True, copy_state=False), strict=True)
            self.parts = {str(key): Recorded(f"{name}.{own}", each) for key, (own, each) in pairs}
            self.value = {key: torch.zeros(()) for key in self.parts}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Records a call. Returns what stands for its value."""
        self._record("forward", arguments, keywords)
        return self.value

    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Records a call without a value."""
        self._record("update", arguments, keywords)

    def compute(self) -> Tensor:
        """Raises UsageError: a stage has parts of batches."""
        raise UsageError(f"{self.name}.compute() was called in a step: log the metric, or call it at the epoch's end")

    def items(self, **_: Any) -> Iterable[tuple[str, Recorded]]:
        """The metrics of a collection, by name."""
        return self.parts.items()

    def __getitem__(self, name: str) -> Recorded:
        """A metric of a collection."""
        return self.parts[name]

    def source_of(self, value: object) -> Source | None:
        """Where a value that the step logs comes from; None if it does not come from this metric."""
        if value is self:
            return Source(self.name, is_itself=True)
        if value is self.value:
            return Source(self.name)
        found = (Source(self.name, key) for key in self.parts if value is self.value[key])
        inner = (each.source_of(value) for each in self.parts.values())
        return next(found, None) or next((each for each in inner if each is not None), None)

    def _record(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.calls.setdefault(method, []).append(([*arguments], keywords))


@dataclass(frozen=True)
class Source:
    """Where a logged value comes from.

    Attributes:
        metric: name of the metric, or of the collection.
        key: which value of the collection.
        is_itself: True for the metric itself instead of its value.
    """

    metric: str
    key: str | None = None
    is_itself: bool = False

    def is_in(self, values: Mapping[str, Any]) -> bool:
        """True if `values`, which has those of the metrics that were called, has this one's or its collection's."""
        return self.metric in values or (self.is_itself and self.metric.rpartition(".")[0] in values)

    def of(self, module: nn.Module, values: Mapping[str, Any]) -> Any:
        """The value. `values` has those of the metrics that were called."""
        if self.is_itself:
            return module.get_submodule(self.metric)
        return values[self.metric] if self.key is None else values[self.metric][self.key]


def names_of_metrics(module: nn.Module) -> list[str]:
    """The names of the metrics in a module, and of the collections; not of those within others."""
    names: list[str] = []
    for name, each in module.named_modules():
        if isinstance(each, Metric | MetricCollection) and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return names


@contextmanager
def recording(module: nn.Module, names: Sequence[str]) -> Iterator[list[Recorded]]:
    """Inside the `with` block, what is returned takes the place of the metrics in `module` with these names."""
    places = []
    for name in names:
        owner, _, key = name.rpartition(".")
        modules = module.get_submodule(owner)._modules
        places.append((modules, key, modules[key], Recorded(name, modules[key])))
    for modules, key, _, recorded in places:
        modules[key] = recorded
    try:
        yield [recorded for *_, recorded in places]
    finally:
        for modules, key, metric, _ in places:
            modules[key] = metric


def calls_of(recorded: Iterable[Recorded]) -> Calls:
    """The calls of those that were called."""
    every = [each for outer in recorded for each in (outer, *outer.parts.values())]
    return {each.name: each.calls for each in every if each.calls}


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
