"""What a prepared model returns in training: the loss of a step that has run, or an output for which a step runs as
soon as the script asks a function of torch.nn.functional for its loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.stages.loss import Weighing

_LOSSES = {each for name, each in vars(functional).items() if name.endswith(("_loss", "entropy", "_logits", "kl_div"))}
_ONLY_LOSS = (
    "training returns the loss alone, since the other outputs are on the rank with the last stage: read them in "
    "evaluation, with model.eval() under torch.no_grad()"
)


class StepOutput:
    """The output of a step in training.

    Args:
        loss: its mean loss, a scalar tensor with a graph.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __getitem__(self, key: int | str) -> Tensor:
        """The loss, as `output[0]` or `output["loss"]`. Raises UsageError for another key."""
        if key in (0, "loss"):
            return self.loss
        raise UsageError(f"output[{key!r}]: {_ONLY_LOSS}")

    def __getattr__(self, name: str) -> Any:
        """Raises UsageError for another output."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(f"output.{name}: {_ONLY_LOSS}")


@dataclass(frozen=True)
class _Read:
    """A step of what the script does with an output before it computes the loss: an attribute, an item or a call."""

    kind: str
    value: Any

    def of(self, output: Any) -> Any:
        if self.kind == "attribute":
            return getattr(output, self.value)
        if self.kind == "item":
            return output[self.value]
        arguments, keywords = self.value
        return output(*arguments, **keywords)


class AskedLoss(nn.Module):
    """The loss that a script computes from a model's output, as a criterion.

    Args:
        function: a function of torch.nn.functional.
        reads: what the script does with the output before.
        arguments: the function's arguments by name, without the output's.
        name: the name of the output's argument.
    """

    def __init__(
        self, function: Callable[..., Tensor], reads: Sequence[_Read], arguments: dict[str, Any], name: str
    ) -> None:
        super().__init__()
        self._function, self._reads, self._name = function, reads, name
        self._rest = {key: each for key, each in arguments.items() if not isinstance(each, Tensor) or key == "weight"}
        self._tensors = {key: each for key, each in arguments.items() if key not in self._rest}
        self.reduction = arguments.get("reduction", "mean")

    def labels(self, samples: int) -> dict[str, Tensor]:
        """The tensors that are split into microbatches, with `samples` as their first size. Raises UsageError for one
        that cannot be split.
        """
        for name, each in self._tensors.items():
            if not each.dim() or not samples or len(each) % samples:
                raise UsageError(
                    f"the loss has an argument {name!r} of shape {tuple(each.shape)}, which cannot be split like the "
                    f"{samples} samples of the batch: pass labels of which each sample has as many"
                )
        return {name: each.unflatten(0, (samples, -1)) for name, each in self._tensors.items()}

    def forward(self, output: Any, labels: dict[str, Tensor]) -> Tensor:
        """The loss of a microbatch, from its output and its labels."""
        for read in self._reads:
            output = read.of(output)
        parts = {name: each.flatten(0, 1) for name, each in labels.items()}
        loss: Tensor = self._function(**{self._name: output}, **parts, **self._rest)
        return loss

    @property
    def weigh(self) -> Callable[..., float] | None:
        """The weight of a microbatch in the batch's mean loss, from its labels; None for its number of samples."""
        if self.reduction == "sum":
            return Weighing(adds=True)
        if self._function not in (functional.cross_entropy, functional.nll_loss):
            return None
        return Weighing(self._rest.get("ignore_index", -100), classes=self._rest.get("weight"), leaf=0)


class LazyOutput:
    """The output of a model that computes no loss itself, before its step has run. Attributes, items and methods are
    those of the output; a loss of torch.nn.functional, or of a module of torch.nn that calls one, runs the step.

    Args:
        run: function that runs the step with a loss, and returns it.
        device: the device to which the script moves its labels.
        reads: what was done with the output so far.
    """

    def __init__(self, run: Callable[[AskedLoss], Tensor], device: torch.device, reads: Sequence[_Read] = ()) -> None:
        self._run, self.device, self._reads = run, device, reads

    def _then(self, kind: str, value: Any) -> LazyOutput:
        return LazyOutput(self._run, self.device, [*self._reads, _Read(kind, value)])

    def __getattr__(self, name: str) -> LazyOutput:
        """What the output has there, such as its logits. Raises UsageError for a loss."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "loss":
            raise UsageError(
                "the model computed no loss at its first call: pass its labels to every call, or give its output to a "
                "loss of torch.nn.functional"
            )
        return self._then("attribute", name)

    def __getitem__(self, key: Any) -> LazyOutput:
        """What the output has there."""
        return self._then("item", key)

    def __call__(self, *arguments: Any, **keywords: Any) -> LazyOutput:
        """What a method of the output returns."""
        return self._then("call", (arguments, keywords))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Tensor:
        """Runs the step if `function` is a loss. Raises UsageError for another function."""
        given = (
            inspect.signature(function).bind(*arguments, **(keywords or {})).arguments if function in _LOSSES else {}
        )
        found = [name for name, each in given.items() if isinstance(each, cls)]
        if len(found) != 1:
            raise UsageError(
                f"{getattr(function, '__name__', function)} was called with a model's output in training, which is on "
                "the rank with the last stage alone: give the output itself, or a view of it, to one loss of "
                "torch.nn.functional, or pass labels to a model that computes its own loss"
            )
        output: LazyOutput = given.pop(found[0])
        return output._run(AskedLoss(function, output._reads, given, found[0]))
