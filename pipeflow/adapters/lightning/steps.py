"""The steps of a LightningModule as its forward, which stages run: a call computes a step's loss, what the step logs,
and what else it returns. Metrics of torchmetrics only record there with what they are called; the module's own get
whole batches, on every rank. Must not contain: how results are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.module import Metric, MetricCollection
from torch import Tensor, nn

from pipeflow.adapters.libraries import instead
from pipeflow.adapters.lightning.tokens import losses_of_model, require_own_loss
from pipeflow.adapters.ranks import gathered
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context

TRAINING = "training_step"


@dataclass
class StepState:
    """What the stages of a rank need beside a batch, and what they find out about the steps.

    Attributes:
        trainer: the Trainer.
        places: the arguments of the step after the batch, such as its index.
        options: for each step, the arguments with which it logs a name, by the name.
        metrics: for each step, the metric that it logs under a name.
        of_loss: names under which the training step logs its loss itself.
        silent: the steps that return and log nothing beside the loss.
        over_context: whether context ranks share the tokens of each batch.
    """

    trainer: Any = None
    places: tuple[int, ...] = ()
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, dict[str, LogSource]] = field(default_factory=dict)
    of_loss: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    over_context: bool = False


class StepForward:
    """The part of a class of LightningModules that runs a step in place of the module's own forward."""

    _step_running: StepState
    _step_class: type[Any]
    _step_metrics: list[str]

    @property
    def logger(self) -> Any:
        """Raises UsageError: a stage has parts of batches."""
        raise UsageError(
            f"{self._step_class.__name__} reads self.logger in a step, which runs for each part of a batch: log numbers"
            " with self.log, and use self.logger in on_train_batch_end, which gets what training_step returns"
        )

    @property
    def loggers(self) -> Any:
        """Raises UsageError as `logger` does."""
        return self.logger

    def forward(self, labels: Any, method: str) -> dict[str, Any]:
        """The result of a step, for a microbatch.

        Args:
            labels: the microbatch; all of it, since nothing says which of its tensors are the labels.
            method: name of the step, such as "training_step".

        Raises UsageError for a training step without a loss.
        """
        module: Any = self
        running, own = self._step_running, self._step_class
        logs = Logs(running, method)
        if running.trainer is not None and vars(self).get("_trainer") is None:
            module.trainer = running.trainer
        with (
            instead(vars(self), forward=partial(own.forward, self), log=logs.log, log_dict=logs.log_dict),
            recording(module, self._step_metrics) as logs.recorded,
            _growing(vars(self)) as grown,
            losses_of_model(module, labels) if running.over_context else nullcontext() as losses,
        ):
            returned = getattr(own, method)(self, labels, *running.places)
        result: dict[str, Any] = {}
        if method == TRAINING:
            loss = _loss_of(returned, own.__name__)
            result["loss"] = loss
            running.of_loss = logs.of(loss)
            is_dict = isinstance(returned, Mapping)
            returned = {name: each for name, each in returned.items() if name != "loss"} if is_dict else {}
        found = {"rest": returned, "logs": logs.numbers(), "calls": calls_of(logs.recorded), "lists": grown}
        found = {name: each for name, each in found.items() if (each if isinstance(each, dict) else each is not None)}
        if losses is not None:
            require_own_loss(result["loss"], losses, found)
        if found and method in running.silent:
            raise UsageError(
                f"{own.__name__}.{method} returns or logs something in some batches only, after a first batch without: "
                "do it in every batch, so that all ranks expect it"
            )
        return result | found


class Logs:
    """What a step logs: takes the place of `LightningModule.log`.

    Args:
        running: what the step needs.
        method: name of the step.

    Attributes:
        given: the values, by name.
        recorded: what takes the place of the module's metrics.
    """

    def __init__(self, running: StepState, method: str) -> None:
        self.given: dict[str, Any] = {}
        self.recorded: list[RecordedMetric] = []
        self._options = running.options.setdefault(method, {})
        self._metrics = running.metrics.setdefault(method, {})

    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """Keeps a value until the batch has run. Raises UsageError for one that is no number."""
        options = {**dict(zip(_POSITIONS, arguments, strict=False)), **options}
        self._options[name] = options
        sources = (each.source_of(value) for each in self.recorded)
        source = next((each for each in sources if each is not None), None)
        if source is not None:
            self._metrics[name] = source
            return
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise UsageError(f"self.log({name!r}) got a {type(value).__name__}: log a number or a tensor of one entry")
        self.given[name] = value

    def of(self, loss: Tensor) -> list[str]:
        """The names under which the loss itself is logged, which are taken out of the values."""
        names = [name for name, value in self.given.items() if value is loss]
        for name in names:
            del self.given[name]
        return names

    def numbers(self) -> dict[str, Tensor]:
        """The values as scalar tensors."""
        return {name: _number(value) for name, value in self.given.items()}

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        """Keeps several values, as `log` does."""
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **options)


def _number(value: Tensor | float) -> Tensor:
    number = value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value))
    return number.float()


_POSITIONS = list(signature(LightningModule.log).parameters)[3:]


def _loss_of(returned: Any, name: str) -> Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor) or loss.dim():
        raise UsageError(
            f"{name}.training_step returned no loss, but a {type(returned).__name__}: return a scalar tensor for every "
            "batch, or a dict with it as 'loss'"
        )
    return loss


@contextmanager
def _growing(own: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
    """Inside the `with` block, lists of a module may grow. Afterwards they are as before, and their new entries are
    returned, by name: such as outputs that are kept until the end of an epoch.
    """
    lists = {name: (each, len(each)) for name, each in own.items() if type(each) is list}
    grown: dict[str, list[Any]] = {}
    try:
        yield grown
    finally:
        for name, (each, length) in lists.items():
            if len(each) > length:
                grown[name] = each[length:]
                del each[length:]


@contextmanager
def stepping(module: Any, running: StepState) -> Iterator[None]:
    """Inside the `with` block, the module's forward is its steps. Copies that are made there keep this."""
    own, names = type(module), names_of_metrics(module)
    module.__class__ = type(
        own.__name__, (StepForward, own), {"_step_running": running, "_step_class": own, "_step_metrics": names}
    )
    try:
        yield
    finally:
        module.__class__ = own


Calls = dict[str, dict[str, list[tuple[list[Any], dict[str, Any]]]]]
"""By the name of a metric and of its method: the arguments of each call."""


class RecordedMetric(nn.Module):
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
        self.parts: dict[str, RecordedMetric] = {}
        self.value: Any = torch.zeros(())
        if isinstance(metric, MetricCollection):
            pairs = zip(metric.keys(), metric.items(keep_base=True, copy_state=False), strict=True)
            self.parts = {str(key): RecordedMetric(f"{name}.{own}", each) for key, (own, each) in pairs}
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

    def items(self, **_: Any) -> Iterable[tuple[str, RecordedMetric]]:
        """The metrics of a collection, by name."""
        return self.parts.items()

    def __getitem__(self, name: str) -> RecordedMetric:
        """A metric of a collection."""
        return self.parts[name]

    def source_of(self, value: object) -> LogSource | None:
        """Where a value that the step logs comes from; None if it does not come from this metric."""
        if value is self:
            return LogSource(self.name, is_itself=True)
        if value is self.value:
            return LogSource(self.name)
        found = (LogSource(self.name, key) for key in self.parts if value is self.value[key])
        inner = (each.source_of(value) for each in self.parts.values())
        return next(found, None) or next((each for each in inner if each is not None), None)

    def _record(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.calls.setdefault(method, []).append(([*arguments], keywords))


@dataclass(frozen=True)
class LogSource:
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
def recording(module: nn.Module, names: Sequence[str]) -> Iterator[list[RecordedMetric]]:
    """Inside the `with` block, what is returned takes the place of the metrics in `module` with these names."""
    recorded = []
    with ExitStack() as stack:
        for name in names:
            owner, _, key = name.rpartition(".")
            modules: dict[str, Any] = module.get_submodule(owner)._modules
            recorded.append(RecordedMetric(name, modules[key]))
            stack.enter_context(instead(modules, **{key: recorded[-1]}))
        yield recorded


def calls_of(recorded: Iterable[RecordedMetric]) -> Calls:
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
