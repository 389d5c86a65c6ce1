"""Optimizers made from a whole module's parameters, before the module is cut: each rank keeps its own parameters in
their groups. Must not contain: wrappers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.runtime.names import plain_name


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
            elif _has_others(state, parameter):
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


def _has_others(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """True if there are states of another shape than the parameter."""
    return any(isinstance(each, Tensor) and each.dim() and each.shape != parameter.shape for each in state.values())
