"""Deferring weight gradients: one call makes the layers of a module defer them, so that a backward B can run as its two
halves, I and W. Must not contain: when the halves run.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeflow.engine.deferral.compile_backend import CompiledCall, Opaque, is_compiled
from pipeflow.engine.deferral.layers import DeferringConv1d, DeferringConv2d, DeferringEmbedding, DeferringLinear
from pipeflow.engine.deferral.products import Deferral, has_hooks

__all__ = ["Deferrable", "Deferral", "defer_weight_gradients"]


@runtime_checkable
class Deferrable(Protocol):
    """A layer that hands products to its `deferral`, which `defer_weight_gradients` sets."""

    deferral: Deferral | None

    def deferred_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are in those products."""
        ...


def defer_weight_gradients(module: nn.Module, deferral: Deferral | None = None) -> Deferral:
    """Makes layers of `module` hand their weight gradients to a Deferral, which is returned.

    These layers are every nn.Linear, nn.Conv1d, nn.Conv2d and nn.Embedding, and every layer that is Deferrable. Some
    layers are not changed: subclasses of these classes, layers with their own forward, and embeddings with `sparse` or
    `max_norm`. Layers whose weight is not a plain floating-point parameter (a parametrization, a DTensor) are not
    changed either. I computes the weight gradient of such a layer, and `Deferral.remaining` names it; the same is true
    for modules that torch.compile compiled.

    A gradient that other code can observe is not deferred. I computes it if the weight or the bias has hooks, or if
    other code holds its autograd node, for example to hook the node. torch.autograd.grad computes it as usual. A
    backward with create_graph=True is refused. While `Deferral.active` is False, all layers are the plain ones.

    The function may be called again for the same module, and layers keep their Deferral. A layer that is also part of
    another module gets the Deferral of the last call. A backward of the other module then computes the gradient of this
    layer at once.

    Args:
        module: the module whose layers defer.
        deferral: the result of an earlier call for the same module, which then also receives gradients of layers that
            were replaced since. By default a new one.
    """
    layers = [layer for layer in map(_prepared, module.modules()) if layer is not None]
    deferral = deferral or _given_to_just(layers) or Deferral(module)
    deferral.module = ref(module)
    for layer in layers:
        layer.deferral = deferral
    deferral.num_layers = len(layers)
    late = _late(module, layers)
    wanted = [(name, each) for name, each in module.named_parameters() if not is_lazy(each) and each.requires_grad]
    deferral.deferred = {name: each.numel() for name, each in wanted if id(each) in late}
    deferral.remaining = {name: each.numel() for name, each in wanted if id(each) not in late}
    return deferral


def _late(module: nn.Module, layers: list[Deferrable]) -> set[int]:
    """The ids of the parameters whose gradients are deferred."""
    groups = [layer.deferred_parameters() for layer in layers]
    late = {id(parameter) for group in groups if not any(map(has_hooks, group)) for parameter in group}
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


_DEFERRING: dict[type, type[nn.Module]] = {
    each.stock: each for each in (DeferringLinear, DeferringConv1d, DeferringConv2d, DeferringEmbedding)
}


def _prepared(layer: nn.Module) -> Deferrable | None:
    """The layer if it defers, after making a stock layer do so; otherwise None. Under fully_shard none does, as torch
    takes gradients when a backward ends.
    """
    deferring = _DEFERRING.get(type(layer))
    if deferring is not None and _is_stock(layer):
        vars(layer)["__module__"] = type(layer).__module__  # torch.fx does not look into layers of torch
        layer.__class__ = deferring
    if not isinstance(layer, Deferrable) or any(type(each) is not nn.Parameter for each in layer.deferred_parameters()):
        return None
    return layer


def _is_stock(layer: nn.Module) -> bool:
    """Returns True if the layer has the forward of its class, and a weight whose gradient is one product."""
    weight = layer._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.layout is not torch.strided:
        return False
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.max_norm is not None):
        return False
    return "forward" not in vars(layer) and weight.numel() > 0
