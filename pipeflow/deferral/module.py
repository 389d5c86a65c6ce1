"""Deferring weight gradients: one call makes the layers of a module leave them for later, so that a backward B can
run as its two halves, I and W. What must not live here: when either runs.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeflow.deferral.compiled import CompiledCall, Opaque, is_compiled
from pipeflow.deferral.layers import DeferringConv1d, DeferringConv2d, DeferringEmbedding, DeferringLinear
from pipeflow.deferral.products import Deferral

__all__ = ["Deferrable", "Deferral", "defer_weight_gradients"]


@runtime_checkable
class Deferrable(Protocol):
    """A layer that hands products to its `deferral`, which is given to it here."""

    deferral: Deferral | None

    def deferred_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are in those products."""
        ...


def defer_weight_gradients(module: nn.Module, deferral: Deferral | None = None) -> Deferral:
    """Makes every nn.Linear, nn.Conv1d, nn.Conv2d and nn.Embedding in `module`, and every layer that is Deferrable,
    hand its weight gradients to the Deferral that is returned.

    Left as they are: subclasses of these layers, layers with a forward of their own or whose weight is not a plain
    floating-point parameter (a parametrization, a DTensor), embeddings with `sparse` or `max_norm`. Such a layer's
    weight gradient is part of I, and `Deferral.remaining` names it; so is that of a module that torch.compile
    compiled. Hooks of a parameter run once per backward, with W or at the end of B. torch.autograd.grad leaves
    parameters alone as ever, but cannot ask for a deferred one, nor for a graph of the backward.

    Calling it again is harmless: the same layers keep their Deferral, and a layer that is also part of another
    module goes to the last caller's; a backward of the other module then computes that layer's gradient at once. With
    the `deferral` of an earlier call, layers that have replaced others since hand their gradients to that one.
    """
    layers = [layer for layer in map(_prepared, module.modules()) if layer is not None]
    deferral = deferral or _given_to_just(layers) or Deferral(module)
    deferral.module = ref(module)
    for layer in layers:
        layer.deferral = deferral
    deferral.num_layers = len(layers)
    late = _late(module, layers)
    made = [(name, parameter) for name, parameter in module.named_parameters() if not is_lazy(parameter)]
    wanted = [(name, parameter) for name, parameter in made if parameter.requires_grad]
    deferral.deferred = {name: parameter.numel() for name, parameter in wanted if id(parameter) in late}
    deferral.remaining = {name: parameter.numel() for name, parameter in wanted if id(parameter) not in late}
    return deferral


def _late(module: nn.Module, layers: list[Deferrable]) -> set[int]:
    """The ids of the parameters whose gradients are left for later."""
    late = {id(parameter) for layer in layers for parameter in layer.deferred_parameters()}
    for compiled in filter(is_compiled, module.modules()):
        call, inside = compiled._compiled_call_impl, list(compiled.parameters())
        late -= set(map(id, inside))
        if isinstance(call, CompiledCall):
            late |= {id(parameter) for parameter in inside if call.waits(parameter)}
            for layer in compiled.modules():
                if isinstance(layer, Deferrable) and isinstance(layer, Opaque) and not layer.compiles:
                    late |= set(map(id, layer.deferred_parameters()))
    return late


def _given_to_just(layers: list[Deferrable]) -> Deferral | None:
    """The Deferral that all of `layers` have and no other layer ever had."""
    deferrals = {id(layer.deferral): layer.deferral for layer in layers}
    [deferral] = deferrals.values() if len(deferrals) == 1 else [None]
    return deferral if deferral is not None and deferral.num_layers == len(layers) else None


_DEFERRING = {
    nn.Linear: DeferringLinear,
    nn.Conv1d: DeferringConv1d,
    nn.Conv2d: DeferringConv2d,
    nn.Embedding: DeferringEmbedding,
}


def _prepared(layer: nn.Module) -> Deferrable | None:
    """The layer, if it defers; a stock one is made to."""
    deferring = _DEFERRING.get(type(layer))
    if deferring is not None and _is_stock(layer):
        layer.__class__ = deferring
    return layer if isinstance(layer, Deferrable) else None


def _is_stock(layer: nn.Module) -> bool:
    """Whether the layer computes as its class says, with a weight whose gradient is one product."""
    weight = layer._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.layout is not torch.strided:
        return False
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.max_norm is not None):
        return False
    return "forward" not in vars(layer) and weight.numel() > 0
