"""Trial: what an optimizer does with small random weights: whether it steps each entry, or each weight, by itself. Must
not contain: weights of a model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched, current_context, is_launched, keep, kept
from pipeflow.engine.parallel.sharding import Split, expert_splits_of, splits_of
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.layer import cut
from pipeflow.engine.tensor.regions import gathered

LOG = logging.getLogger("pipeflow")
_SIZES = (4, 6)  # of the first dimensions; all others have size 2
_SCALES = (1.0, 30.0, 0.1, 100.0, 1.0)  # of the gradient in each step, since some optimizers clip
_TOLERANCE = 1e-3  # of the largest change: float32's rounding is far smaller, statistics of a half differ far more


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying an optimizer on two random weights.

    Attributes:
        is_elementwise: a part of a weight is stepped as it is within the whole.
        is_separate: a weight is stepped as it is without other weights.
        alike: names of the states that have the weight's shape.
    """

    is_elementwise: bool
    is_separate: bool
    alike: frozenset[str]


UNKNOWN = Trial(is_elementwise=False, is_separate=True, alike=frozenset())
"""Assumed of an optimizer that cannot be tried: stepping each weight whole is then as good as possible."""


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The step of an optimizer's class without the hooks that torch puts around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns True if a step evaluates the loss by itself, such as LBFGS's."""
    closure = inspect.signature(plain_step(optimizer)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def tried(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, *dims: int) -> Trial:
    """Steps random weights with as many dimensions as `like`, with a new optimizer of the same class and the options of
    `group`: two weights together and apart, and one in halves along each of `dims`.

    An optimizer whose constructor takes other arguments, or that draws random numbers, is UNKNOWN.
    """
    first, *others = (_tried(optimizer, group, like, dim) for dim in dims)
    if any(each is UNKNOWN for each in (first, *others)):
        return UNKNOWN
    return replace(first, is_elementwise=all(each.is_elementwise for each in (first, *others)))


def _tried(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, dim: int) -> Trial:
    """The trial with halves along one dimension."""
    shape = [*_SIZES, *[2] * like.dim()][: like.dim()]
    weights, gradients = _drawn(shape, dim, torch.device("cpu") if like.is_meta else like.device)
    maker, whole = _Maker(type(optimizer), group), [each[:1] for each in gradients]
    try:
        both, _ = maker.stepped(weights, gradients)
        [one], states = maker.stepped(weights[:1], whole)
        [other], _ = maker.stepped(weights[1:], [each[1:] for each in gradients])
        [again], _ = maker.stepped(weights[:1], whole)
        halves = _in_halves(maker, weights[0], [gradient for [gradient] in whole], dim) if like.dim() else one
    except Exception as error:
        LOG.info("%s cannot be tried on a small weight (%s)", type(optimizer).__name__, error)
        return UNKNOWN
    start = weights[0]
    if not _is_near(one, again, start):
        return UNKNOWN
    alike = frozenset(name for name, state in states.items() if state.shape == start.shape)
    others = any(state.numel() != 1 for name, state in states.items() if name not in alike)
    return Trial(
        is_elementwise=not others and _is_near(one, halves, start),
        is_separate=all(map(_is_near, both, [one, other], weights)),
        alike=alike,
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes optimizers of one class with the options of a group."""

    kind: type[Optimizer]
    group: Mapping[str, Any]

    def stepped(
        self, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The weights after one step for each of `gradients`, and the tensors in the state of the first."""
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        options = {name: value for name, value in self.group.items() if name not in ("params", "param_names")}
        lr = options.get("lr")
        if isinstance(lr, Tensor):
            options["lr"] = torch.full_like(lr, 0.1)
        elif lr is not None:
            options["lr"] = 0.1  # a schedule may start at 0, with which no step changes anything
        known = inspect.signature(self.kind).parameters
        made: Any = self.kind(parameters, **{name: value for name, value in options.items() if name in known})
        made.param_groups[0].update(options)
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient.clone()
            with torch.no_grad():
                plain_step(made)(made)
        states = {name: each for name, each in made.state[parameters[0]].items() if isinstance(each, Tensor)}
        return [parameter.detach() for parameter in parameters], states


def _in_halves(maker: _Maker, weight: Tensor, gradients: Sequence[Tensor], dim: int) -> Tensor:
    """The weight whose halves were stepped by two optimizers."""
    halves = zip(weight.chunk(2, dim), *(gradient.chunk(2, dim) for gradient in gradients), strict=True)
    return torch.cat([maker.stepped([half], [[each] for each in its])[0][0] for half, *its in halves], dim)


def _drawn(shape: Sequence[int], dim: int, device: torch.device) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two weights, and for each step their gradients; the second half along `dim` is larger than the first."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cpu")
        if shape:
            drawn.chunk(2, dim)[1].mul_(3)
        return drawn.to(device)

    weights = [draw(), 5 * draw()]
    return weights, [[scale * draw(), 7 * scale * draw()] for scale in _SCALES]


def _is_near(one: Tensor, other: Tensor, start: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * (one - start).abs().max())


_KEY = "stepping"
Stepped = Mapping[nn.Parameter, nn.Parameter]
"""For each parameter that an optimizer steps on this rank, the tensor that it steps: the parameter, or its master."""


@dataclass(frozen=True, slots=True)
class Stepping:
    """How one optimizer is stepped on this rank.

    Attributes:
        targets: ids of the tensors that it steps, in order; other tensors need another one.
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
class _Steppings:
    """The models of this rank, and how their optimizers are stepped."""

    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    stepped: WeakKeyDictionary[Optimizer, Stepped] = field(default_factory=WeakKeyDictionary)
    shared: WeakSet[Optimizer] = field(default_factory=WeakSet)  # replicas step others of the weights
    divided: WeakKeyDictionary[nn.Module, set[nn.Parameter]] = field(default_factory=WeakKeyDictionary)
    dividers: WeakSet[Optimizer] = field(default_factory=WeakSet)  # which step those that are divided
    found: WeakKeyDictionary[Optimizer, Stepping] = field(default_factory=WeakKeyDictionary)

    def of(self, optimizer: Optimizer) -> Stepping:
        targets = [id(target) for group in optimizer.param_groups for target in group["params"]]
        stepping = self.found.get(optimizer)
        if stepping is None or stepping.targets != targets:
            stepping = self.found[optimizer] = self._find(optimizer, targets)
        return stepping

    def _find(self, optimizer: Optimizer, targets: list[int]) -> Stepping:
        context, stepped = context_if_launched(), self.stepped.get(optimizer, {})
        divided = {id(parameter) for weights in self.divided.values() for parameter in weights}
        if optimizer not in self.dividers and not divided.isdisjoint([*targets, *map(id, stepped)]):
            raise UsageError(
                f"{type(optimizer).__name__} steps parameters that a Zero has divided over data ranks, so this rank "
                "has some of their gradients alone: step the Zero, or make a Zero of this optimizer"
            )
        known, experts = dict[int, Split | None](), set[int]()
        for model in self.models:
            splits = splits_of(model)
            experts |= expert_splits_of(model).keys()
            known |= {id(parameter): splits.get(id(parameter)) for parameter in model.parameters()}
        known |= {id(target): known.get(id(parameter)) for parameter, target in stepped.items()}
        experts |= {id(target) for parameter, target in stepped.items() if id(parameter) in experts}
        _require_elementwise(optimizer, experts)
        splits = {target: split for target in targets if (split := known.get(target)) is not None}
        is_known = not targets or not known.keys().isdisjoint(targets)
        if context is None or not is_known or getattr(optimizer, "steps_parts", False):
            return Stepping(targets, is_known, splits)
        if context.world_size == context.copies.size and optimizer not in self.shared:
            return Stepping(targets, is_known, splits)
        return Stepping(targets, is_known, splits, *_wholes(optimizer, splits))


def _require_elementwise(optimizer: Optimizer, experts: set[int]) -> None:
    """Raises UsageError if an optimizer steps tensors of `experts`, by id, and needs the whole weights to do so."""
    for group in optimizer.param_groups:
        if (held := next((each for each in group["params"] if id(each) in experts), None)) is None:
            continue
        if getattr(optimizer, "steps_parts", False) or not tried(optimizer, group, held, 0).is_elementwise:
            raise UsageError(
                f"{type(optimizer).__name__} needs whole weights, but expert ranks have parts of them: use an "
                "elementwise optimizer such as AdamW, or launch with experts=1"
            )


def _wholes(optimizer: Optimizer, splits: Mapping[int, Split]) -> tuple[bool, dict[int, frozenset[str]]]:
    """Tries an optimizer once for each kind of weight. Returns `is_elementwise` and `wholes` of its Stepping. Raises
    UsageError if it needs all weights of a model at once.
    """
    name, trials, found = type(optimizer).__name__, dict[tuple[int, int, tuple[int, ...]], Trial](), {}
    if needs_closure(optimizer):
        raise UsageError(
            f"{name} computes a step from all weights and from several losses, but this rank has only some of the "
            "weights: train with data=... ranks alone, or use an optimizer that steps each weight by itself"
        )
    for index, group in enumerate(optimizer.param_groups):
        for target in group["params"]:
            split = splits.get(id(target))
            kind = index, target.dim(), (0,) if split is None else split.dims
            if kind not in trials:
                trials[kind] = tried(optimizer, group, target, *kind[2])
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
    known = _here()
    if model not in known.models:
        known.models.add(model)
        known.found.clear()


def tell(optimizer: Optimizer, model: nn.Module, stepped: Stepped, *, is_shared: bool) -> None:
    """Registers what a wrapped optimizer updates instead of the parameters of `model`, and whether other replicas
    update others of them.
    """
    watch(model)
    known, optimizer = _here(), innermost(optimizer)
    known.stepped[optimizer] = stepped
    if is_shared:
        known.shared.add(optimizer)
    known.found.pop(optimizer, None)


def divide(optimizer: Optimizer, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Registers parameters of `model` of whose gradients each replica has some alone. No other optimizer steps them."""
    known = _here()
    known.divided.setdefault(model, set()).update(parameters)
    known.dividers.add(optimizer)
    known.found.clear()


def stepping_of(optimizer: Optimizer) -> Stepping:
    """How an optimizer steps weights on this rank. It is tried when it is first asked for with these weights.

    Raises UsageError if ranks that have some of the weights of a model cannot step them with it.
    """
    return _here().of(innermost(optimizer))


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside all that wrap it, such as accelerate's."""
    inner = next((each for each in vars(optimizer).values() if isinstance(each, Optimizer)), None)
    return optimizer if inner is None else innermost(inner)


def _here() -> _Steppings:
    if (known := kept(_KEY)) is None:
        keep(_KEY, known := _Steppings())
    found: _Steppings = known
    return found


def _before_step(
    optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Steps weights whole that an optimizer must not step in parts. Then nothing is left to step: returns the arguments
    of a step without weights.
    """
    if not is_launched() or kept(_KEY) is None:
        return None
    if innermost(optimizer) is not optimizer:
        return None  # the optimizer in it comes here, too
    stepping, context = stepping_of(optimizer), current_context()
    if stepping.is_elementwise or context.tensor_size == 1:
        return None
    if any(each is not None for each in (*arguments[1:], *keywords.values())):
        raise UsageError(
            f"{type(optimizer).__name__} needs whole weights, but tensor ranks have parts of them, so its step takes "
            "no closure: run the batch first, then call step()"
        )
    with context.alarm.raised_everywhere(), torch.no_grad():
        _step(optimizer, stepping, context.tensor)
    return (_twin(optimizer, [{**group, "params": []} for group in optimizer.param_groups]),), {}


register_optimizer_step_pre_hook(_before_step)


def _step(optimizer: Optimizer, stepping: Stepping, group: Group) -> None:
    """Steps one after the other the weights that must be whole, then all others together."""
    rest: list[list[nn.Parameter]] = []
    for options in optimizer.param_groups:
        rest.append([target for target in options["params"] if id(target) not in stepping.wholes])
        for target in options["params"]:
            if id(target) in stepping.wholes and target.grad is not None:
                _step_whole(optimizer, options, target, stepping, group)
    whole = [options["params"] for options in optimizer.param_groups]
    try:
        for options, targets in zip(optimizer.param_groups, rest, strict=True):
            options["params"] = targets
        plain_step(optimizer)(optimizer)
    finally:
        for options, targets in zip(optimizer.param_groups, whole, strict=True):
            options["params"] = targets


def _step_whole(
    optimizer: Optimizer, options: Mapping[str, Any], part: nn.Parameter, stepping: Stepping, group: Group
) -> None:
    """Puts a weight, its gradient and its states together from the parts of all tensor ranks, steps it, and keeps this
    rank's part. States of another shape than the weight stay whole.
    """
    split, alike, states = stepping.splits[id(part)], stepping.wholes[id(part)], optimizer.state
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
