"""An optimizer's states by the names of its parameters: what a checkpoint asks of an optimizer, and how a plain
torch.optim one answers. What must not live here: files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError

States = Mapping[str, Mapping[str, Any]]
"""By parameter name, by key: tensors and plain values."""


@runtime_checkable
class NamedOptimizer(Protocol):
    """An optimizer that steps only some parameters on this rank, or others in their place.

    Attributes:
        stepped: each parameter that is stepped on this rank, with what is stepped in its place, or itself.
        param_groups: the groups of what is stepped.
    """

    stepped: Mapping[nn.Parameter, nn.Parameter]
    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Under "state" what this rank keeps, by the names of `model.named_parameters()`; a tensor of a parameter's
        shape lies over the tensor ranks as the parameter does. Under "param_groups" each group's options, and beside
        them plain values that are the same on all ranks.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back this rank's part."""


class Named:
    """A plain optimizer as a NamedOptimizer; a parameter with several names is called by the first.

    Raises UsageError for a parameter that `model` does not have.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in held:
            if id(parameter) not in known:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model: "
                    "make it from model.parameters()"
                )
        self.stepped: Mapping[nn.Parameter, nn.Parameter] = {parameter: parameter for parameter in held}
        self.param_groups = optimizer.param_groups
        self._optimizer = optimizer
        self._names = [known[id(parameter)] for parameter in held]

    def state_dict(self) -> dict[str, Any]:
        states = self._optimizer.state
        named = {name: dict(states.get(each, {})) for name, each in zip(self._names, self.stepped, strict=True)}
        return {"state": named, "param_groups": [options_of(group) for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = self._optimizer.state_dict()["param_groups"]
        groups = [{**group, **options} for group, options in zip(groups, state_dict["param_groups"], strict=True)]
        named = [state_dict["state"][name] for name in self._names]
        states = {index: dict(state) for index, state in enumerate(named) if state}
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        self.param_groups = self._optimizer.param_groups


def named(optimizer: Optimizer | NamedOptimizer, model: nn.Module) -> NamedOptimizer:
    """`optimizer`, or what names its states for it."""
    if isinstance(optimizer, NamedOptimizer):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return Named(optimizer, model)
    raise UsageError(f"an optimizer is a torch.optim.Optimizer or a NamedOptimizer, got {type(optimizer).__name__}")


def names_by_group(optimizer: NamedOptimizer, model: nn.Module) -> list[list[str]]:
    """Of every group, what `model.named_parameters()` calls the parameters that are stepped in it."""
    called = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {id(held): called[id(parameter)] for parameter, held in optimizer.stepped.items()}
    return [[names[id(held)] for held in group["params"]] for group in optimizer.param_groups]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, without its parameters."""
    return {option: value for option, value in group.items() if option not in ("params", "param_names")}


def common_options(names: Iterable[str], options: States) -> dict[str, Any]:
    """Those that a group's parameters were saved with; none for an empty group. Raises UsageError when they differ."""
    first: str | None = None
    for name in names:
        if first is None:
            first = name
        elif options[name] != options[first]:
            raise UsageError(
                f"one group of the optimizer has {first!r}, saved with {dict(options[first])}, and {name!r}, saved "
                f"with {dict(options[name])}: make its groups as they were when it was saved"
            )
    return {} if first is None else dict(options[first])
