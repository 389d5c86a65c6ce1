"""Planting faults: what goes wrong in parallel training, done to a job on purpose, to test one's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeflow.core.errors import UsageError, nearest
from pipeflow.engine.parallel.sharding import own_values
from pipeflow.engine.runtime.original import unwrapped_name


@contextmanager
def plant(
    cause: str,
    model: nn.Module,
    name: str = "",
    *,
    factor: float = 2.0,
    microbatch: int = 1,
) -> Iterator[None]:
    """Plants a fault in a job while the `with` block lasts. Plant it before `record`, and on one rank to spoil one.

        with plant("scale", model, factor=4), record("parallel", model):
            train(steps=2)

    Args:
        cause: what goes wrong: "scale" multiplies gradients by `factor`; "missing_microbatch" drops what a microbatch
            adds; "masked_tokens" lets it count `factor` times; "missing_reduction" and "missing_tie" keep the gradients
            that this rank computed itself; "norm" scales all gradients by one over `factor`, as clipping to a norm that
            is too large does; "stale" uses the gradients of the step before; "dropout" drops half of a module's
            outputs; "precision" rounds them to bfloat16; "order" reverses the batch; "sharding" exchanges the halves of
            a weight.
        model: this rank's module.
        name: of a module, or the start of names of parameters; "" is all of them.
        factor: of "scale", "masked_tokens" and "norm".
        microbatch: index of the microbatch, counted by the backwards of a step.

    Raises UsageError for an unknown cause, or a name that the model lacks. "missing_microbatch", "masked_tokens",
    "missing_reduction" and "missing_tie" need an engine whose backwards add to `.grad` through autograd.
    """
    if cause not in FAULTS:
        raise UsageError(f"unknown fault {cause!r}; {nearest(cause, [*FAULTS])}")
    named = ((unwrapped_name(own), parameter) for own, parameter in model.named_parameters())
    chosen = [parameter for own, parameter in named if own.startswith(name)]
    module = next((each for own, each in model.named_modules() if unwrapped_name(own) == name), None)
    if not chosen and module is None:
        raise UsageError(f"the model has no {name!r}: name a module, or the start of names of parameters")
    fault = Fault(module or model, chosen, factor, microbatch)
    handles = FAULTS[cause](fault)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Fault:
    """What the faults share.

    Args:
        module: the module that is named.
        parameters: those whose names begin like that.
        factor, microbatch: as in `plant`.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], factor: float, microbatch: int) -> None:
        self.module, self.parameters = module, parameters
        self.factor, self.microbatch = factor, microbatch

    def before_steps(self, change: Callable[[nn.Parameter], object]) -> list[Any]:
        """Calls `change` for each parameter with a gradient before an optimizer steps."""

        def before(*_: object) -> None:
            with torch.no_grad():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        change(parameter)

        return [register_optimizer_step_pre_hook(before)]

    def after_backwards(self, change: Callable[[nn.Parameter, int], None]) -> list[Any]:
        """Calls `change(parameter, index)` after each addition to its gradient in a step."""
        counts: dict[int, int] = {}

        def after(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            index = counts.get(id(parameter), 0)
            counts[id(parameter)] = index + 1
            with torch.no_grad():
                change(parameter, index)

        handles: list[Any] = [each.register_post_accumulate_grad_hook(after) for each in self.parameters]
        return [*handles, register_optimizer_step_post_hook(lambda *_: counts.clear())]

    def output(self, change: Callable[[Tensor], Tensor]) -> list[Any]:
        """Changes the output of the module."""
        return [self.module.register_forward_hook(lambda _, __, output: change(output))]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return own_values(parameter.grad)


def _microbatch(fault: Fault, share: float) -> list[Any]:
    """Lets the gradient of one microbatch count `share` times."""
    before: dict[int, Tensor] = {}

    def change(parameter: nn.Parameter, index: int) -> None:
        gradient = _gradient(parameter)
        if index == fault.microbatch:
            old = before.get(id(parameter), torch.zeros_like(gradient))
            gradient.copy_(old + share * (gradient - old))
        before[id(parameter)] = gradient.clone()

    return fault.after_backwards(change)


def _own_gradients(fault: Fault) -> list[Any]:
    """Gives the optimizer the gradients that this rank computed, before ranks added theirs up."""
    own: dict[int, Tensor] = {}

    def keep(parameter: nn.Parameter, _: int) -> None:
        own[id(parameter)] = _gradient(parameter).clone()

    def put(parameter: nn.Parameter) -> None:
        if id(parameter) in own:
            _gradient(parameter).copy_(own[id(parameter)])

    return [*fault.after_backwards(keep), *fault.before_steps(put)]


def _stale(fault: Fault) -> list[Any]:
    last: dict[int, Tensor] = {}

    def change(parameter: nn.Parameter) -> None:
        gradient = _gradient(parameter)
        now = gradient.clone()
        gradient.copy_(last.get(id(parameter), gradient))
        last[id(parameter)] = now

    return fault.before_steps(change)


def _dropout(fault: Fault) -> list[Any]:
    dropout = nn.Dropout(0.5)
    fault.module.dropout_p = 0.5  # type: ignore[assignment]  # as modules that drop values say it
    return fault.output(dropout)


def _precision(fault: Fault) -> list[Any]:
    return fault.output(lambda output: output.to(torch.bfloat16).to(output.dtype))


def _order(fault: Fault) -> list[Any]:
    def reverse(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each.flip(0) if isinstance(each, Tensor) else each for each in given)

    return [fault.module.register_forward_pre_hook(reverse)]


def _sharding(fault: Fault) -> list[Any]:
    with torch.no_grad():
        for parameter in fault.parameters:
            values = own_values(parameter.data)
            values.copy_(values.roll(max(1, len(values) // 2), 0))
    return []


FAULTS: dict[str, Callable[[Fault], list[Any]]] = {
    "scale": lambda fault: fault.before_steps(lambda parameter: _gradient(parameter).mul_(fault.factor)),
    "missing_tie": _own_gradients,
    "missing_microbatch": lambda fault: _microbatch(fault, 0.0),
    "missing_reduction": _own_gradients,
    "masked_tokens": lambda fault: _microbatch(fault, fault.factor),
    "norm": lambda fault: fault.before_steps(lambda parameter: _gradient(parameter).div_(fault.factor)),
    "stale": _stale,
    "dropout": _dropout,
    "precision": _precision,
    "order": _order,
    "sharding": _sharding,
}
