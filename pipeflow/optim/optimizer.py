"""What any optimizer keeps, by the names of parameters, as checkpoints want it; and Wrapper, the base of optimizers
around optimizers. What must not live here: what such a wrapper does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.runtime.names import plain_name

MASTER = "master"  # among a parameter's states: the float32 weight that is stepped in its place


@runtime_checkable
class LooksAtWholes(Protocol):
    """An optimizer whose step looks at whole weights, of which a rank may hold a part."""

    def lies_in(self, model: nn.Module, stepped: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Says whose parameters it steps, and what it steps in place of each."""


class Wrapper(Optimizer):
    """An optimizer that lets another one step. It shares that one's groups, defaults and state, so that learning-rate
    schedulers work on either.

    Attributes:
        model: whose parameters are stepped.
        inner: the optimizer within.
        parameters: all that `inner` was made for.
        step_was_skipped: whether the last `step` changed nothing, since a gradient overflowed: ask before a scheduler
            of the learning rate takes its step.
        stepped: what the innermost optimizer steps in place of each parameter that this rank steps: the parameter
            itself, or its master. One dict for a chain of wrappers.
    """

    step_was_skipped = False

    def __init__(self, model: nn.Module, inner: Optimizer) -> None:
        require_parameters_of(model, inner)
        super().__init__(inner.param_groups, inner.defaults)
        self.model = model
        self.inner = inner
        self.parameters: list[nn.Parameter] = (
            inner.parameters if isinstance(inner, Wrapper) else list(stepped_by(inner))
        )
        self.stepped = stepped_by(inner)
        plain = innermost(inner)
        if isinstance(plain, LooksAtWholes):
            plain.lies_in(model, self.stepped)
        self.share()

    def share(self) -> None:
        """Takes over the groups and the state of `inner`, after that one got new ones."""
        if isinstance(self.inner, Wrapper):
            self.inner.share()
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses, once it is made: the optimizer within gets its groups before it is wrapped."""
        if hasattr(self, "inner"):
            raise UsageError("add the group to the optimizer before it is wrapped")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters, also of those that another rank steps."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()  # may be a view, or have a graph

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps: `state` by parameter name, as `named_state` gives it, and the groups' options, the
        same on all ranks of `data`. The states of several ranks, merged, are what one rank would keep.
        """
        return {"state": named_state(self, self.model), "param_groups": list(map(options_of, self.param_groups))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what this rank needs of a `state_dict`, its own or merged ones. Raises UsageError when it lacks
        a group, or a parameter's name is unknown.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise UsageError(f"the saved optimizer has {len(groups)} groups, this one {len(self.param_groups)}")
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update(options)
        load_named_state(self, self.model, state_dict["state"])

    def refuse_closure(self, closure: Callable[[], float] | None) -> None:
        """Raises UsageError for a closure: a step that is run again needs all ranks."""
        if closure is not None:
            raise UsageError(f"{type(self).__name__}.step takes no closure: run execute_pipeline, then step()")


def require_parameters_of(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises UsageError when `optimizer` steps what is no parameter of `model`."""
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for parameter in stepped_by(optimizer)):
        raise UsageError("the optimizer steps what is no parameter of the model: make it from model.parameters()")


def by_name(optimizer: Optimizer, model: nn.Module) -> Wrapper:
    """`optimizer`, or a Wrapper that tells a plain one's states by the names of parameters.

    Raises UsageError for what is no optimizer, or steps what is no parameter of `model`.
    """
    if isinstance(optimizer, Wrapper):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return Wrapper(model, optimizer)
    raise UsageError(f"an optimizer is a torch.optim.Optimizer, got {type(optimizer).__name__}")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, without its parameters."""
    return {option: value for option, value in group.items() if option not in ("params", "param_names")}


def names_by_group(optimizer: Wrapper) -> list[list[str]]:
    """Of every group, what `optimizer.model.named_parameters()` calls the parameters that are stepped in it."""
    called = _names_of(optimizer.model)
    names = {id(target): called[id(parameter)] for parameter, target in optimizer.stepped.items()}
    return [[names[id(target)] for target in group["params"]] for group in optimizer.param_groups]


def _names_of(model: nn.Module) -> dict[int, str]:
    """What `model.named_parameters()` calls each, without what torch.compile adds, by its id."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}


def named_state(optimizer: Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """What `optimizer` keeps on this rank, by the names of `model.named_parameters()`: per parameter its states by
    their names, tensors that are not copied, and where a float32 weight is stepped in its place, that as "master".

    A state of more than no dimension has the parameter's shape under any optimizer that works entry by entry, so it
    lies over tensor ranks as the parameter does. With Zero each data rank has what it owns.
    """
    names = _names_of(model)
    return {
        names[id(parameter)]: {
            **optimizer.state.get(target, {}),
            **({} if target is parameter else {MASTER: target.detach()}),
        }
        for parameter, target in stepped_by(optimizer).items()
    }


@torch.no_grad()
def load_named_state(optimizer: Optimizer, model: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives `optimizer` what `named_state` told, of one rank or merged ones: each parameter that this rank steps takes
    its own. A parameter with a master takes its value too; one that had none gives its own value to the master. Tensors
    whose dtype and device fit are kept, not copied, as torch does.

    Raises UsageError when a parameter that is stepped here is not among `states`.
    """
    names = _names_of(model)
    stepped = stepped_by(optimizer)
    if missing := [names[id(parameter)] for parameter in stepped if names[id(parameter)] not in states]:
        raise UsageError(f"the saved optimizer knows nothing of {missing[0]!r} and {len(missing) - 1} more parameters")
    kept = {}
    for parameter, target in stepped.items():
        entries = dict(states[names[id(parameter)]])
        master = entries.pop(MASTER, parameter)
        if target is not parameter:
            target.copy_(master)
            parameter.copy_(target)
        kept[id(target)] = entries
    give_states(innermost(optimizer), kept)
    if isinstance(optimizer, Wrapper):
        optimizer.share()


def stepped_by(optimizer: Optimizer) -> dict[nn.Parameter, nn.Parameter]:
    """Each parameter that this rank steps, with what is stepped in its place: itself, or its master."""
    if isinstance(optimizer, Wrapper):
        return optimizer.stepped
    return {parameter: parameter for group in optimizer.param_groups for parameter in group["params"]}


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer in all wrappers."""
    return innermost(optimizer.inner) if isinstance(optimizer, Wrapper) else optimizer


def give_states(optimizer: Optimizer, kept: Mapping[int, dict[str, Any]]) -> None:
    """Gives a plain optimizer its states by the ids of what it steps; it casts them as it would its own."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: kept[id(parameter)] for index, parameter in enumerate(owned) if kept[id(parameter)]}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
