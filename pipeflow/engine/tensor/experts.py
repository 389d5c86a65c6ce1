"""Experts over ranks: each expert rank holds some of the experts of a layer. Tokens are sent to the ranks of their
experts, and outputs back. Must not contain: routers, which choose the experts of a token, and sums of gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.parallel.turns import Turns
from pipeflow.engine.tensor.layer import Membership, WaitingLayer, cut, require_indices
from pipeflow.engine.tensor.regions import all_to_all
from pipeflow.engine.tensor.stepping import watch

_FORM = ("num_experts", "has_gate", "has_bias", "is_transposed")  # what transformers gives each layer of experts


class DividedExperts(WaitingLayer):
    """Experts with the forward of their class, of which each expert rank holds an equal part, in rank order. The
    forward takes tokens, the indices of the experts of each token, and their weights, as in transformers.
    """

    _experts_whole: int
    _experts_members: Membership

    def expert_splits(self) -> Mapping[str, Split]:
        return {name: Split(0, self._experts_whole) for name in self._parameters}


def divide_experts(*modules: nn.Module, group: Group | None = None) -> None:
    """Divides the experts of each layer of experts over the expert ranks, in place. Each rank keeps an equal part of
    them, in rank order; they must be the same on every rank before. Each token is computed by the ranks that hold its
    experts, and no token is dropped. The gradient of an expert is divided by the number of expert ranks, which is then
    averaged over the ranks that hold the same experts. So a step has the mean over all replicas.

    Divided are layers as transformers has them: parameters with an entry per expert along the first dimension, and a
    forward that takes tokens, indices of experts and their weights. A layer of another form stays whole on each rank.

    Args:
        modules: the modules, such as this rank's stages.
        group: the expert ranks; by default those of the context, or a group of one without a launch.

    Raises UsageError if the number of ranks does not divide the experts of a layer. Nothing is then changed.
    """
    if group is None:
        context = context_if_launched()
        group = Alone() if context is None else context.experts
    found = [layer for module in modules for _, layer in experts_in(module, group.size)]
    if group.size == 1:
        return
    with torch.no_grad():
        for layer in dict.fromkeys(found):
            whole: int = vars(layer)["num_experts"]
            for parameter in layer._parameters.values():
                if parameter is not None:
                    parameter.data, parameter.grad = cut(parameter, Split(0, whole), group), None
            layer.__class__ = _divided(type(layer))  # type: ignore[arg-type]  # types are hashable
            vars(layer).update(
                num_experts=whole // group.size,
                _experts_whole=whole,
                _experts_members=Membership(group),
            )
    for module in modules:
        watch(module)


def experts_in(module: nn.Module, ranks: int) -> Iterator[tuple[str, nn.Module]]:
    """The layers of experts in `module` that can be divided, by name. Raises UsageError for experts that `ranks` expert
    ranks cannot share equally.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, DividedExperts) or not all(each in vars(layer) for each in _FORM):
            continue
        experts, own = vars(layer)["num_experts"], [each for each in layer._parameters.values() if each is not None]
        if len(list(layer.parameters())) > len(own) or not own or any(each.shape[:1] != (experts,) for each in own):
            continue  # of another form, or of another stage
        if experts % ranks:
            sizes = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
            raise UsageError(
                f"{name} has {experts} experts, which {ranks} expert ranks cannot share equally: choose experts={sizes}"
            )
        yield name, layer


@lru_cache(maxsize=1024)
def _divided(kind: type[nn.Module]) -> type[nn.Module]:
    stock: Callable[..., Tensor] = kind.forward
    signature = inspect.signature(stock)

    @wraps(stock)
    def forward(self: DividedExperts, *args: Any, **kwargs: Any) -> Tensor:
        _, tokens, indices, weights = signature.bind(self, *args, **kwargs).args
        group = self._experts_members.group
        context = context_if_launched()
        turns = Turns() if context is None else context.turns
        sent = Exchange(indices, self._experts_whole, group, turns)
        mine = _scaled(sent.there(tokens.reshape(-1, tokens.shape[-1])), group.size)
        if len(mine):
            ones = torch.ones(len(mine), 1, dtype=weights.dtype, device=weights.device)
            outputs = stock(self, mine, sent.experts[:, None], ones).to(tokens.dtype)
        else:
            outputs = _NoTokens.apply(mine, *self._parameters.values())  # type: ignore[no-untyped-call]  # torch's
        outputs = sent.back(_scaled(outputs, 1 / group.size))
        total: Tensor = (outputs * weights.reshape(-1, weights.shape[-1], 1)).sum(1)
        return total.to(tokens.dtype).view(tokens.shape)

    return type(kind.__name__, (DividedExperts, kind), {"__module__": kind.__module__, "forward": forward})


class Exchange:
    """The way of tokens to the ranks that hold their experts, and back.

    Args:
        indices: the experts of each token of this rank, [tokens, k].
        experts: number of experts of all ranks.
        group: the expert ranks.
        turns: those of this rank, one of which is passed on while tokens are on the way, there and back.

    Attributes:
        experts: for each row that this rank gets, the index of its expert among this rank's, [rows].

    Raises UsageError for an index of no expert.
    """

    def __init__(self, indices: Tensor, experts: int, group: Group, turns: Turns) -> None:
        self._group, self._k, self._turns = group, indices.shape[-1], turns
        chosen = indices.reshape(-1)
        require_indices(chosen, experts, "the indices of experts")
        self._order = chosen.argsort(stable=True)  # of pairs of a token and an expert, by expert, and so by rank
        counts = torch.bincount(chosen, minlength=experts).view(group.size, -1)
        own, equal = torch.empty_like(counts), [1] * group.size
        group.all_to_all(own, counts, equal, equal).wait()  # pairs of each rank, for each expert of this one
        self._send, self._receive = torch.stack([counts, own]).sum(2).tolist()
        local = torch.arange(own.shape[1], device=own.device).repeat(group.size)
        self.experts = local.repeat_interleave(own.flatten())

    def there(self, tokens: Tensor) -> Tensor:
        """Sends each token, [tokens, width], to the ranks of its experts. Returns the rows that this rank gets."""
        rows = tokens[self._order.div(self._k, rounding_mode="floor")]
        return all_to_all(rows, self._group, self._send, self._receive, self._turns.finish)

    def back(self, outputs: Tensor) -> Tensor:
        """Sends the output of each row back. Returns those of this rank's tokens, [tokens, k, width]."""
        sorted_by_expert = all_to_all(outputs, self._group, self._receive, self._send, self._turns.finish)
        return sorted_by_expert[self._order.argsort()].view(len(self._order) // self._k, self._k, outputs.shape[-1])


class _Scaled(Function):
    """Returns its input, whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _scaled(input: Tensor, factor: float) -> Tensor:
    output: Tensor = _Scaled.apply(input, factor)  # type: ignore[no-untyped-call]  # torch's
    return output


class _NoTokens(Function):
    """The output of experts that get no tokens. Its backward is needed, since others wait in it; the gradients of the
    experts are zeros.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.weights = weights
        return rows.new_empty(rows.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.weights, ctx.needs_input_grad[1:], strict=True)
        return gradient, *(torch.zeros_like(weight) if is_needed else None for weight, is_needed in needed)
