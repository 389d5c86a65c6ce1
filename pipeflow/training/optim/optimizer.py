"""Optimizer states by parameter name, for checkpoints; and Wrapper, the base class of optimizers that wrap another one.
Must not contain: particular wrappers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.original import plain_name
from pipeflow.engine.tensor.stepping import innermost, needs_closure, stepping_of, tell

MASTER = "master"  # a parameter's state that is the float32 weight stepped in its place


class Wrapper(Optimizer):
    """An optimizer that wraps another one. It shares the inner optimizer's groups, defaults and state, so learning-rate
    schedulers work on either.

    Attributes:
        model: the model whose parameters are stepped.
        inner: the wrapped optimizer.
        parameters: all parameters that `inner` was made for.
        stepped: for each parameter that this rank steps, the tensor that the innermost optimizer steps: the parameter
            itself, or its master. Nested wrappers share one dict.
    """

    @property
    def step_was_skipped(self) -> bool:
        """True if the last `step` changed nothing because a gradient overflowed; a learning-rate scheduler should not
        step then.
        """
        return False

    def __init__(self, model: nn.Module, inner: Optimizer) -> None:
        require_parameters_of(model, inner)
        super().__init__(inner.param_groups, inner.defaults)
        self.model = model
        self.inner = inner
        self.parameters: list[nn.Parameter] = (
            inner.parameters if isinstance(inner, Wrapper) else list(stepped_by(inner))
        )
        self.stepped = stepped_by(inner)
        self.share()

    def share(self) -> None:
        """Shares the groups and the state of `inner` again, after they were replaced, or after `stepped` was."""
        if isinstance(self.inner, Wrapper):
            self.inner.share()
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        tell(innermost(self), self.model, self.stepped, is_shared=len(self.stepped) < len(self.parameters))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: groups must be added to the inner optimizer before it is wrapped."""
        if hasattr(self, "inner"):
            raise UsageError("a wrapped optimizer takes no new group: add the group before wrapping the optimizer")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters of the model, also those that another rank steps."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()  # may be a view, or have a graph

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state: "state" by parameter name, as from `named_state`, and "param_groups", the groups'
        options, the same on all data ranks. Merged states of all data ranks are the state of the whole optimizer.
        """
        return {"state": named_state(self, self.model), "param_groups": list(map(options_of, self.param_groups))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores this rank's part of a `state_dict`, its own or a merged one. Raises UsageError if the number of
        groups differs, or if the state of a parameter is missing.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise UsageError(f"the saved optimizer has {len(groups)} groups, but this one {len(self.param_groups)}")
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update(options)
        load_named_state(self, self.model, state_dict["state"])

    def refuse_closure(self, closure: Callable[[], float] | None) -> None:
        """Raises UsageError for a closure, because running a step again would need all ranks."""
        if closure is not None:
            raise UsageError(f"{type(self).__name__}.step takes no closure: call execute_pipeline, then step()")


def require_parameters_of(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises UsageError if `optimizer` is not an optimizer, or steps parameters that are not in `model`."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for parameter in stepped_by(optimizer)):
        raise UsageError("the optimizer has parameters that are not in the model: make it from model.parameters()")


def require_no_closure(optimizer: Optimizer) -> None:
    """Raises UsageError if `optimizer.step` cannot be called without a closure."""
    plain = innermost(optimizer)
    if needs_closure(plain):
        raise UsageError(
            f"{type(plain).__name__}.step needs a closure that computes the loss again, but each batch is run once: "
            "choose an optimizer whose step takes no closure, such as AdamW or SGD"
        )


def by_name(optimizer: Optimizer, model: nn.Module) -> Wrapper:
    """`optimizer` if it is a Wrapper, else a Wrapper of it, whose `state_dict` is by parameter name.

    Raises UsageError if `optimizer` is not an optimizer, or has parameters that are not in `model`.
    """
    return optimizer if isinstance(optimizer, Wrapper) else Wrapper(model, optimizer)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, without its parameters."""
    return {option: value for option, value in group.items() if option not in ("params", "param_names")}


def names_by_group(optimizer: Wrapper) -> list[list[str]]:
    """For each group, the names (as in `optimizer.model.named_parameters()`) of the parameters stepped in it."""
    called = _names_of(optimizer.model)
    names = {id(target): called[id(parameter)] for parameter, target in optimizer.stepped.items()}
    return [[names[id(target)] for target in group["params"]] for group in optimizer.param_groups]


def states_alike(optimizer: Wrapper) -> dict[str, frozenset[str]]:
    """For each split parameter that is stepped whole, by name: the names of its states that are split in the same way.
    All other states are whole on every tensor rank.
    """
    called, wholes = _names_of(optimizer.model), stepping_of(optimizer).wholes
    return {
        called[id(parameter)]: wholes[id(target)]
        for parameter, target in optimizer.stepped.items()
        if id(target) in wholes
    }


def _names_of(model: nn.Module) -> dict[int, str]:
    """Names from `model.named_parameters()`, without torch.compile's additions, by the parameter's id."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}


def named_state(optimizer: Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the states that `optimizer` keeps on this rank, `{parameter name: {state name: value}}`, with names from
    `model.named_parameters()`. Tensors are not copied. If a float32 master is stepped in a parameter's place, it is the
    state "master". With Zero, each data rank has the states of the parameters that it owns.

    A state with the shape of its parameter is split over the tensor ranks like the parameter. Other states, such as
    Adafactor's means over rows, are whole on every tensor rank.
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
    """Restores states from `named_state`, of one rank or merged, for each parameter that this rank steps. If `states`
    has a master, the parameter gets its value; otherwise the parameter's value is copied to its master. As in torch,
    tensors of the right dtype and device are kept, not copied.

    Raises UsageError if a parameter that is stepped here is missing in `states`.
    """
    names = _names_of(model)
    stepped = stepped_by(optimizer)
    if missing := [names[id(parameter)] for parameter in stepped if names[id(parameter)] not in states]:
        raise UsageError(f"the saved optimizer lacks {missing[0]!r} and {len(missing) - 1} more parameters")
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
    """The parameters that this rank steps, each with the tensor that is stepped: itself, or its master."""
    if isinstance(optimizer, Wrapper):
        return optimizer.stepped
    return {parameter: parameter for group in optimizer.param_groups for parameter in group["params"]}


def give_states(optimizer: Optimizer, kept: Mapping[int, dict[str, Any]]) -> None:
    """Gives a plain optimizer states by the ids of the tensors that it steps, cast as in its `load_state_dict`."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: kept[id(parameter)] for index, parameter in enumerate(owned) if kept[id(parameter)]}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class WholeGroups:
    """The groups of an optimizer, by the names that its parameters have in the whole module.

    Args:
        optimizer: an optimizer of parameters of `module`.
        names: the names of the whole module's parameters by their ids, as from `names_of`.

    Raises UsageError if `optimizer` is not an optimizer, or has other parameters.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, list[str]]) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if any(id(each) not in names for group in optimizer.param_groups for each in group["params"]):
            raise UsageError("the optimizer has parameters that are not in the model: make it from model.parameters()")
        self._optimizer = optimizer
        self._names = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        self._kept = [[*range(len(group))] for group in self._names]

    @property
    def names(self) -> list[list[str]]:
        """A name of each parameter of each group, also of those of other ranks."""
        return [[each[0] for each in group] for group in self._names]

    def keep(self, own: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Keeps this rank's parameters in the groups, of which `own` gives all names. Raises UsageError if there are
        states of whole weights, of which this rank has parts.
        """
        here, optimizer, kept = dict(own), self._optimizer, set[nn.Parameter]()
        self._kept = kept_here = list[list[int]]()
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            first = [next((name for name in each if name in here), None) for each in names]
            found = [name for name in first if name is not None]
            kept_here.append([place for place, name in enumerate(first) if name is not None])
            group["params"] = [here[name] for name in found]
            if "param_names" in group:
                group["param_names"] = found
            kept.update(group["params"])
        for parameter, state in list(optimizer.state.items()):
            if parameter not in kept:
                del optimizer.state[parameter]
            elif any(
                isinstance(each, Tensor) and each.dim() and each.shape != parameter.shape for each in state.values()
            ):
                raise UsageError(
                    f"{type(optimizer).__name__} has states of whole weights, but a tensor rank has only parts: "
                    "pass an optimizer that has taken no step, and load its states from a checkpoint"
                )

    def part_of(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of the state_dict of an optimizer of the whole module, such as that of a run in one process.

        Raises UsageError if it has other groups.
        """
        if [len(group["params"]) for group in states["param_groups"]] != [*map(len, self._names)]:
            raise UsageError("the states are those of an optimizer with other groups: make the same optimizer")
        groups = list[dict[str, Any]]()
        state = dict[int, Any]()
        first = 0
        for group, places in zip(states["param_groups"], self._kept, strict=True):
            own = {first + number: group["params"][place] for number, place in enumerate(places)}
            state.update({mine: states["state"][its] for mine, its in own.items() if its in states["state"]})
            groups.append({**group, "params": [*own]})
            first += len(places)
        return {**states, "param_groups": groups, "state": state}


def names_of(module: nn.Module) -> dict[int, list[str]]:
    """All names of a module's parameters, by their ids."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(plain_name(name))
    return dict(names)
