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

TRAINING = "training_step"


@dataclass
class Running:
    """What the stages of a rank need beside a batch, and what they find out about the steps.

    Attributes:
        trainer: the Trainer.
        places: the arguments of the step after the batch, such as its index.
        options: for each step, the arguments with which it logs a name, by the name.
    """

    trainer: Any = None
    places: tuple[int, ...] = ()
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


class StepForward:
    """The part of a class of LightningModules that runs a step in place of the module's own forward."""

    running: Running
    own: type[Any]

    def forward(self, labels: Any, method: str) -> dict[str, Any]:
        """The result of a step, for a microbatch.

        Args:
            labels: the microbatch; all of it, since nothing says which of its tensors are the labels.
            method: name of the step, such as "training_step".

        Raises UsageError for a training step without a loss.
        """
        running, logs = self.running, Logs(self, method)
        self._meet(running.trainer)
        replaced = {"forward": partial(self.own.forward, self), "log": logs.log, "log_dict": logs.log_dict}
        with _instead(vars(self), replaced):
            returned = getattr(self.own, method)(self, labels, *running.places)
        result: dict[str, Any] = {"loss": _loss_of(returned, type(self).__name__)} if method == TRAINING else {}
        rest = returned
        if method == TRAINING:
            is_dict = isinstance(returned, Mapping)
            rest = {name: each for name, each in returned.items() if name != "loss"} if is_dict else None
        if rest is not None:
            result["rest"] = rest
        if logs.values:
            result["logs"] = logs.values
        return result

    def _meet(self, trainer: Any) -> None:
        if vars(self).get("_trainer") is None:
            self.trainer = trainer


class Logs:
    """What a step logs: takes the place of `LightningModule.log`.

    Args:
        module: the module.
        method: name of the step.

    Attributes:
        values: the values as tensors, by name.
    """

    def __init__(self, module: Any, method: str) -> None:
        self.values: dict[str, Tensor] = {}
        self._options = module.running.options.setdefault(method, {})

    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """Keeps a value until the batch has run. Raises UsageError for one that is no number."""
        options = {**dict(zip(_POSITIONS, arguments, strict=False)), **options}
        self._options[name] = options
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise UsageError(f"self.log({name!r}) got a {type(value).__name__}: log a number or a tensor of one entry")
        number = value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value))
        self.values[name] = number.float()

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        """Keeps several values, as `log` does."""
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **options)


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
    own = type(module)
    module.__class__ = type(own.__name__, (StepForward, own), {"running": running, "own": own})
    try:
        yield
    finally:
        module.__class__ = own
