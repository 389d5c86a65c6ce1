"""Trial: what an optimizer does with small random weights: whether it steps each entry, or each weight, by itself. Must
not contain: weights of a model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


def tried(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, dim: int) -> Trial:
    """Steps random weights with as many dimensions as `like`, with a new optimizer of the same class and the options of
    `group`: two weights together and apart, and one in halves along `dim`.

    An optimizer whose constructor takes other arguments, or that draws random numbers, is UNKNOWN.
    """
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
