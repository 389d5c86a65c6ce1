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
from pipeflow.engine.runtime.microbatch import Whole
from pipeflow.engine.torch_private.trees import tree_leaves

_LOSSES = {each for name, each in vars(functional).items() if name.endswith(("_loss", "entropy", "_logits", "kl_div"))}
_ONLY_LOSS = (
    "training returns the loss alone, since the other outputs are on the rank with the last stage: read them in "
    "evaluation, with model.eval() under torch.no_grad()"
)
_INSTEAD = (
    "give the output itself, or a view of it, to one loss of torch.nn.functional, or pass labels to a model that "
    "computes its own loss"
)
_OPERATORS = (
    *("neg", "pos", "abs", "invert", "lt", "le", "eq", "ne", "gt", "ge", "bool", "float", "int", "index", "len"),
    *("iter", "contains", "array", "setitem", "iadd", "isub", "imul", "itruediv"),
    *(f"{side}{name}" for side in ("", "r") for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv")),
    *(f"{side}{name}" for side in ("", "r") for name in ("mod", "pow", "and", "or", "xor")),
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
        self._tensors = {key: each for key, each in arguments.items() if isinstance(each, Tensor)}
        self._rest = {key: each for key, each in arguments.items() if key not in self._tensors}
        self._split = {key for key in self._tensors if self._has_samples(key)}

    def _has_samples(self, key: str) -> bool:
        """Returns True if an argument has an entry for each sample; weights of classes have none."""
        each, labels = self._tensors[key], next((self._tensors[key] for key in _LABELS if key in self._tensors), None)
        if not key.endswith("weight") or labels is None:
            return True
        if self._function in (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss):
            return False
        return each.dim() == labels.dim() > 0 and len(each) == len(labels)

    @property
    def key(self) -> object:
        """Equal for losses that differ in the values of tensors alone."""
        rest = sorted((name, repr(each)) for name, each in self._rest.items())
        return self._function, repr(self._reads), self._name, tuple(rest), tuple(self._tensors), tuple(self._split)

    def labels(self, samples: int) -> dict[str, object]:
        """The tensors that are split into microbatches, with `samples` as their first size, and the others as Whole.
        Raises UsageError for one that cannot be split, and for one that the script used with the output before.
        """
        for each in tree_leaves([read.value for read in self._reads]):
            if isinstance(each, Tensor) and each.dim() and samples > 1 and not len(each) % samples:
                raise UsageError(
                    f"a tensor of shape {tuple(each.shape)} was used with a model's output before its loss, and is not "
                    f"split like the {samples} samples of the batch: {_INSTEAD}"
                )
        for name in self._split:
            each = self._tensors[name]
            if not each.dim() or not samples or len(each) % samples:
                raise UsageError(
                    f"the loss has an argument {name!r} of shape {tuple(each.shape)}, which cannot be split like the "
                    f"{samples} samples of the batch: pass labels of which each sample has as many"
                )
        return {
            name: each.unflatten(0, (samples, -1)) if name in self._split else Whole(each)
            for name, each in self._tensors.items()
        }

    def forward(self, output: Any, labels: dict[str, Tensor]) -> Tensor:
        """The loss of a microbatch, from its output and its labels."""
        for read in self._reads:
            output = read.of(output)
        parts = {name: each.flatten(0, 1) if name in self._split else each for name, each in labels.items()}
        loss: Tensor = self._function(**{self._name: output}, **parts, **self._rest)
        return loss


_LABELS = ("target", "targets", "input2")


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
        name = getattr(function, "__name__", str(function))
        if len(found) != 1:
            raise _refused(name)
        if given.get("reduction") == "none":
            raise _refused(f"{name} with reduction='none'")
        output: LazyOutput = given.pop(found[0])
        return output._run(AskedLoss(function, output._reads, given, found[0]))


def _refused(name: str) -> UsageError:
    where = "which is on the rank with the last stage alone"
    return UsageError(f"{name} was called with a model's output in training, {where}: {_INSTEAD}")


def _operator(name: str) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise _refused(name)

    return refuse


for _name in _OPERATORS:
    setattr(LazyOutput, f"__{_name}__", _operator(_name))
