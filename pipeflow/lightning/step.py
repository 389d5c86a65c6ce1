"""The steps of a LightningModule as its forward, which stages run: a call computes a step's loss, what the step logs,
and what else it returns. Must not contain: how these are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.lightning.metrics import Recorded, Source, calls_of, names_of_metrics, recording

TRAINING = "training_step"


@dataclass
class Running:
    """What the stages of a rank need beside a batch, and what they find out about the steps.

    Attributes:
        trainer: the Trainer.
        places: the arguments of the step after the batch, such as its index.
        options: for each step, the arguments with which it logs a name, by the name.
        metrics: for each step, the metric that it logs under a name.
        of_loss: names under which the training step logs its loss itself.
        silent: the steps that return and log nothing beside the loss.
    """

    trainer: Any = None
    places: tuple[int, ...] = ()
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, dict[str, Source]] = field(default_factory=dict)
    of_loss: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)


class StepForward:
    """The part of a class of LightningModules that runs a step in place of the module's own forward."""

    _step_running: Running
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
        replaced = {"forward": partial(own.forward, self), "log": logs.log, "log_dict": logs.log_dict}
        with (
            _instead(vars(self), replaced),
            recording(module, self._step_metrics) as logs.recorded,
            _growing(vars(self)) as grown,
        ):
            returned = getattr(own, method)(self, labels, *running.places)
        result: dict[str, Any] = {}
        if method == TRAINING:
            loss = _loss_of(returned, own.__name__)
            result["loss"] = loss
            running.of_loss = logs.of(loss)
            returned = _rest_of(returned)
        found = {"rest": returned, "logs": logs.numbers(), "calls": calls_of(logs.recorded), "lists": grown}
        found = {name: each for name, each in found.items() if each is not None and not _is_empty(each)}
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

    def __init__(self, running: Running, method: str) -> None:
        self.given: dict[str, Any] = {}
        self.recorded: list[Recorded] = []
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


def _rest_of(returned: Any) -> dict[str, Any]:
    """What a training step returns beside its loss."""
    return {name: each for name, each in returned.items() if name != "loss"} if isinstance(returned, Mapping) else {}


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


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
def _instead(own: dict[str, Any], replaced: Mapping[str, Any]) -> Iterator[None]:
    """Inside the `with` block, attributes of a module are others."""
    before = {name: own[name] for name in replaced if name in own}
    own.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del own[name]
        own.update(before)


@contextmanager
def stepping(module: Any, running: Running) -> Iterator[None]:
    """Inside the `with` block, the module's forward is its steps. Copies that are made there keep this."""
    own, names = type(module), names_of_metrics(module)
    module.__class__ = type(
        own.__name__, (StepForward, own), {"_step_running": running, "_step_class": own, "_step_metrics": names}
    )
    try:
        yield
    finally:
        module.__class__ = own
