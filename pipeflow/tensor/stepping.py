"""Stepping: how an optimizer steps weights of which this rank has a part. torch calls `_before_step` before each step
of any optimizer, so users pass and wrap torch's own optimizers as they are. Must not contain: optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import context_if_launched, current_context, is_launched, keep, kept
from pipeflow.parallel.sharding import Split, splits_of
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.division import cut
from pipeflow.tensor.exchange import gathered
from pipeflow.tensor.trial import Trial, needs_closure, plain_step, tried

_KEY = "stepping"
Stepped = Mapping[nn.Parameter, nn.Parameter]
"""For each parameter that an optimizer steps on this rank, the tensor that it steps: the parameter, or its master."""


@dataclass(frozen=True, slots=True)
class Way:
    """How one optimizer is stepped on this rank.

    Attributes:
        targets: ids of the tensors that it steps, in order; other tensors need another way.
        is_known: whether a model here has any of their parameters; True if it steps none, as on a replica without any.
        splits: by id, the splits of those of which this rank has a part.
        is_elementwise: whether it steps parts as it steps them within whole weights.
        wholes: by id, those that it must step whole, each with the names of the states that have the weight's shape.
    """

    targets: list[int]
    is_known: bool
    splits: Mapping[int, Split]
    is_elementwise: bool = True
    wholes: Mapping[int, frozenset[str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Ways:
    """The models of this rank, and the ways of their optimizers."""

    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    stepped: WeakKeyDictionary[Optimizer, Stepped] = field(default_factory=WeakKeyDictionary)
    shared: WeakSet[Optimizer] = field(default_factory=WeakSet)  # replicas step others of the weights
    found: WeakKeyDictionary[Optimizer, Way] = field(default_factory=WeakKeyDictionary)

    def of(self, optimizer: Optimizer) -> Way:
        targets = [id(target) for group in optimizer.param_groups for target in group["params"]]
        way = self.found.get(optimizer)
        if way is None or way.targets != targets:
            way = self.found[optimizer] = self._find(optimizer, targets)
        return way

    def _find(self, optimizer: Optimizer, targets: list[int]) -> Way:
        context, stepped = context_if_launched(), self.stepped.get(optimizer, {})
        known: dict[int, Split | None] = {}
        for model in self.models:
            splits = splits_of(model)
            known |= {id(parameter): splits.get(id(parameter)) for parameter in model.parameters()}
        known |= {id(target): known.get(id(parameter)) for parameter, target in stepped.items()}
        splits = {target: split for target in targets if (split := known.get(target)) is not None}
        is_known = not targets or not known.keys().isdisjoint(targets)
        if context is None or not is_known or getattr(optimizer, "steps_parts", False):
            return Way(targets, is_known, splits)
        if context.world_size == context.data_size and optimizer not in self.shared:
            return Way(targets, is_known, splits)
        return Way(targets, is_known, splits, *_wholes(optimizer, splits))


def _wholes(optimizer: Optimizer, splits: Mapping[int, Split]) -> tuple[bool, dict[int, frozenset[str]]]:
    """Tries an optimizer once for each kind of weight. Returns `is_elementwise` and `wholes` of its Way. Raises
    UsageError if it needs all weights of a model at once.
    """
    name, trials, found = type(optimizer).__name__, dict[tuple[int, int, int], Trial](), {}
    if needs_closure(optimizer):
        raise UsageError(
            f"{name} computes a step from all weights and from several losses, but this rank has only some of the "
            "weights: train with data=... ranks alone, or use an optimizer that steps each weight by itself"
        )
    for index, group in enumerate(optimizer.param_groups):
        for target in group["params"]:
            split = splits.get(id(target))
            kind = index, target.dim(), 0 if split is None else split.dim
            if kind not in trials:
                trials[kind] = tried(optimizer, group, target, kind[2])
            if not trials[kind].is_separate:
                raise UsageError(
                    f"{name} computes the step of a weight from all weights, but this rank has only some of them: use "
                    "an optimizer that steps each weight by itself, such as AdamW, Muon or Adafactor"
                )
            if split is not None and not trials[kind].is_elementwise:
                if isinstance(target, DTensor):
                    raise UsageError(
                        f"{name} needs whole weights, but both fully_shard and tensor ranks hold parts of one: use one "
                        "of the two, or an elementwise optimizer such as AdamW"
                    )
                found[id(target)] = trials[kind].alike
    return all(trial.is_elementwise for trial in trials.values()), found


def watch(model: nn.Module) -> None:
    """From now on, optimizers of the model's parameters step them as with one rank. Raises UsageError on a thread that
    is not a rank.
    """
    ways = _here()
    if model not in ways.models:
        ways.models.add(model)
        ways.found.clear()


def tell(optimizer: Optimizer, model: nn.Module, stepped: Stepped, *, is_shared: bool) -> None:
    """Says what a wrapped optimizer steps in place of the parameters of `model`, and whether other replicas step others
    of them.
    """
    watch(model)
    ways, optimizer = _here(), _innermost(optimizer)
    ways.stepped[optimizer] = stepped
    if is_shared:
        ways.shared.add(optimizer)
    ways.found.pop(optimizer, None)


def way_of(optimizer: Optimizer) -> Way:
    """How this rank steps an optimizer. Tries the optimizer when it is first asked about its weights.

    Raises UsageError if ranks that have some of the weights of a model cannot step them with it.
    """
    return _here().of(_innermost(optimizer))


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside all that wrap it, such as accelerate's."""
    inner = next((each for each in vars(optimizer).values() if isinstance(each, Optimizer)), None)
    return optimizer if inner is None else _innermost(inner)


def _here() -> _Ways:
    if (ways := kept(_KEY)) is None:
        keep(_KEY, ways := _Ways())
    found: _Ways = ways
    return found


def _before_step(
    optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Steps weights whole that an optimizer must not step in parts. Then nothing is left to step: returns the arguments
    of a step without weights.
    """
    if not is_launched() or kept(_KEY) is None:
        return None
    if _innermost(optimizer) is not optimizer:
        return None  # the optimizer in it comes here, too
    way, context = way_of(optimizer), current_context()
    if way.is_elementwise or context.tensor_size == 1:
        return None
    if any(each is not None for each in (*arguments[1:], *keywords.values())):
        raise UsageError(
            f"{type(optimizer).__name__} needs whole weights, but tensor ranks have parts of them, so its step takes "
            "no closure: run the batch first, then call step()"
        )
    with context.alarm.raised_everywhere(), torch.no_grad():
        _step(optimizer, way, context.tensor)
    return (_twin(optimizer, [{**group, "params": []} for group in optimizer.param_groups]),), {}


register_optimizer_step_pre_hook(_before_step)


def _step(optimizer: Optimizer, way: Way, group: Group) -> None:
    """Steps one after the other the weights that must be whole, then all others together."""
    rest: list[list[nn.Parameter]] = []
    for options in optimizer.param_groups:
        rest.append([target for target in options["params"] if id(target) not in way.wholes])
        for target in options["params"]:
            if id(target) in way.wholes and target.grad is not None:
                _step_whole(optimizer, options, target, way, group)
    whole = [options["params"] for options in optimizer.param_groups]
    try:
        for options, targets in zip(optimizer.param_groups, rest, strict=True):
            options["params"] = targets
        plain_step(optimizer)(optimizer)
    finally:
        for options, targets in zip(optimizer.param_groups, whole, strict=True):
            options["params"] = targets


def _step_whole(optimizer: Optimizer, options: Mapping[str, Any], part: nn.Parameter, way: Way, group: Group) -> None:
    """Puts a weight, its gradient and its states together from the parts of all tensor ranks, steps it, and keeps this
    rank's part. States of another shape than the weight stay whole.
    """
    split, alike, states = way.splits[id(part)], way.wholes[id(part)], optimizer.state
    whole = nn.Parameter(_joined(part, split, group), requires_grad=part.requires_grad)
    vars(whole).update(vars(part))  # some optimizers read marks
    assert part.grad is not None
    whole.grad = _joined(part.grad, split, group)
    states[whole] = {
        name: _joined(state, split, group) if name in alike and state.shape == part.shape else state
        for name, state in states.get(part, {}).items()
    }
    try:
        plain_step(optimizer)(_twin(optimizer, [{**options, "params": [whole]}]))
        part.copy_(cut(whole, split, group))
        states[part] = {
            name: cut(state, split, group) if name in alike and state.shape == whole.shape else state
            for name, state in states[whole].items()
        }
    finally:
        del states[whole]


def _joined(part: Tensor, split: Split, group: Group) -> Tensor:
    return split.joined(gathered(group, part.detach().unsqueeze(0), 0).unbind())


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer with the same states and other groups. What a step writes into itself or into its groups is lost."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), param_groups=groups)
    return twin
