"""Layers that defer: torch's own layers with a backward that returns the input's gradient and hands the weight's
product to a Deferral. Must not contain: how a product is computed, and which layers of a module are made to defer.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.deferral.products import ConvolutionProduct, Deferral, Deferred, EmbeddingProduct, LinearProduct


class DeferredWeights(NamedTuple):
    """The weights that a forward passes to its function. A tuple, so that no parameter is part of the graph."""

    deferral: Deferral
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def trained_bias(self) -> nn.Parameter | None:
        return None if self.bias is None or not self.bias.requires_grad else self.bias


class Deferring(nn.Module):
    """A stock layer that defers. Only its class differs: copies and pickles of it are the stock layer."""

    stock: ClassVar[type[nn.Module]]
    deferral: Deferral | None = None

    def deferred_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients go to the Deferral."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is None or not weight.requires_grad:
            return []
        return [weight] if bias is None or not bias.requires_grad else [weight, bias]

    def _deferred_weights(self) -> DeferredWeights | None:
        """The deferred weights, or None unless there will be a backward by autograd itself."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return None
        if torch._C._get_tracing_state():
            return None
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or not (weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()):
            return None
        if self.deferral is None or not (bias is None or bias.is_leaf):
            return None
        return DeferredWeights(self.deferral, weight, bias)

    def _get_name(self) -> str:
        return self.stock.__name__

    def __prepare_scriptable__(self) -> Deferring:  # called by torch.jit.script
        if "stock" in vars(type(self)):
            raise UsageError(
                f"a {self._get_name()} that defers its weight gradient, as in a Pipeline's chunk, cannot be scripted: "
                "script a copy, which does not defer, as with torch.jit.script(copy.deepcopy(chunk))"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "stock" not in vars(type(self)):  # a class derived from this one, for example by a parametrization
            return super().__reduce_ex__(protocol)
        return object.__new__, (self.stock,), {name: value for name, value in vars(self).items() if name != "deferral"}


class DeferringLinear(Deferring, nn.Linear):
    """An nn.Linear that defers the gradients of its weight and bias."""

    stock = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        deferred = self._deferred_weights()
        if deferred is None:
            return super().forward(input)
        output: Tensor = _Linear.apply(deferred.deferral.anchor, input, deferred)  # type: ignore[no-untyped-call]  # torch's
        return output


class _DeferringConvolution(Deferring, nn.modules.conv._ConvNd):
    def forward(self, input: Tensor) -> Tensor:
        deferred = None if self.weight.is_complex() else self._deferred_weights()
        if deferred is None:
            return self._conv_forward(input, self.weight, self.bias)
        batched = input.dim() == self.weight.dim()
        input, padding = self._pad(input if batched else input.unsqueeze(0))
        geometry = (self.stride, padding, self.dilation, False, (0,) * len(padding), self.groups)
        output: Tensor = _Convolution.apply(deferred.deferral.anchor, input, deferred, geometry)  # type: ignore[no-untyped-call]  # torch's
        return output if batched else output.squeeze(0)

    def _pad(self, input: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The input, padded if needed, and the zeros that the convolution adds on both sides of each dimension."""
        if self.padding_mode == "zeros" and not isinstance(self.padding, str):
            return input, self.padding
        ends = self._reversed_padding_repeated_twice  # left, right of the last dimension, then of the one before
        if self.padding_mode == "zeros" and ends[::2] == ends[1::2]:
            return input, tuple(ends[::-2])
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return functional.pad(input, ends, mode), (0,) * len(self.kernel_size)


class DeferringConv1d(_DeferringConvolution, nn.Conv1d):
    """An nn.Conv1d that defers the gradients of its weight and bias."""

    stock = nn.Conv1d


class DeferringConv2d(_DeferringConvolution, nn.Conv2d):
    """An nn.Conv2d that defers the gradients of its weight and bias."""

    stock = nn.Conv2d


class DeferringEmbedding(Deferring, nn.Embedding):
    """An nn.Embedding that defers the gradient of its weight."""

    stock = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        deferred = self._deferred_weights()
        if deferred is None:
            return super().forward(input)
        output: Tensor = _Embedding.apply(deferred.deferral.anchor, input, deferred, self)  # type: ignore[no-untyped-call]  # torch's
        return output


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, input: Tensor, deferred: DeferredWeights) -> Tensor:
        input, weight, bias = _begin(ctx, input, deferred)
        return _own(functional.linear(input, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])  # shared by all three products
        hand_over(ctx, LinearProduct(ctx.deferred.weight, ctx.deferred.trained_bias, input, rows))
        return None, rows.mm(weight.conj()).view(input.shape) if ctx.needs_input_grad[1] else None, None


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, input: Tensor, deferred: DeferredWeights, geometry: tuple[Any, ...]
    ) -> Tensor:
        input, weight, bias = _begin(ctx, input, deferred)
        ctx.geometry = geometry
        return torch.convolution(input, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        hand_over(
            ctx, ConvolutionProduct(ctx.deferred.weight, ctx.deferred.trained_bias, input, gradient, ctx.geometry)
        )
        of_input = None
        if ctx.needs_input_grad[1]:
            backward = torch.ops.aten.convolution_backward
            of_input = backward(gradient, input, weight, None, *ctx.geometry, (True, False, False))[0]
        return None, of_input, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, input: Tensor, deferred: DeferredWeights, layer: nn.Embedding) -> Tensor:
        ctx.deferred = deferred
        ctx.padding_index = -1 if layer.padding_idx is None else layer.padding_idx
        ctx.scale_by_frequency = layer.scale_grad_by_freq
        ctx.save_for_backward(input)
        return functional.embedding(input, deferred.weight, layer.padding_idx)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        [indices] = ctx.saved_tensors
        weight = ctx.deferred.weight
        hand_over(ctx, EmbeddingProduct(weight, indices, gradient, ctx.padding_index, ctx.scale_by_frequency))
        return None, None, None, None


def _begin(ctx: Any, input: Tensor, deferred: DeferredWeights) -> tuple[Tensor, Tensor, Tensor | None]:
    """Saves what the backward needs; returns the operands of the forward."""
    ctx.deferred = deferred
    operands = lowered(input, deferred.weight, deferred.bias)
    ctx.save_for_backward(*operands[:2])
    return operands


def _own(output: Tensor) -> Tensor:
    """The same values, but not as a view, since torch forbids writing in place to a view that a function returns."""
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


def lowered(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in autocast's dtype, if autocast is on."""
    # Cast here: autocast would cache its cast of the weight, made without a graph, for other uses of the weight.
    device = input.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if enabled and input.dtype is not torch.float64 and not input.is_complex():
        dtype = torch.get_autocast_dtype(input.device.type)
        return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return input, weight, bias


def hand_over(ctx: Any, product: Deferred) -> None:
    """Hands the product to the Deferral, if this backward accumulates gradients in parameters.

    Raises UsageError if the backward itself must be differentiated.
    """
    if torch.is_grad_enabled():
        raise UsageError(
            "a backward with create_graph=True cannot run through a layer that defers its weight gradient: "
            "make the layer an instance of your own subclass, which does not defer"
        )
    if torch._C._will_engine_execute_node(ctx.next_functions[0][0]):  # not in torch.autograd.grad
        ctx.deferred.deferral.take(product)
