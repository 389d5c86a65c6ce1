"""Layers that defer: torch's own layers with a backward that returns the input's gradient and hands the weight's
product to a Deferral, unless other code needs it at once. Must not contain: how a product is computed, and which layers
of a module are made to defer.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.products import (
    Copies,
    Deferral,
    Formula,
    into_gradient,
    of_convolution,
    of_embedding,
    of_linear,
    product_of,
)
from pipeflow.engine.torch_private.autograd import (
    applied,
    is_any_autocast_enabled,
    is_under_functorch,
    tracing_state,
    will_run,
)
from pipeflow.engine.torch_private.tensors import Convolution, unviewed


class DeferredWeights(NamedTuple):
    """The weights of a call that defers. A tuple, so that a function's backward gets the parameters themselves. Its
    first three entries are the first inputs of a function that defers, by which autograd knows the parameters.
    """

    anchor: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    deferral: Deferral


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
        """The deferred weights, or None if nothing may be deferred."""
        if torch.compiler.is_compiling() or is_under_functorch() or tracing_state():
            return None
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or not (weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()):
            return None
        if self.deferral is None or not self.deferral.active or not (bias is None or bias.is_leaf):
            return None
        return DeferredWeights(self.deferral.anchor, weight, bias, self.deferral)

    @property
    def copies(self) -> Copies | None:
        """Where copies of the parameters in autocast's dtype are kept; None outside of a step."""
        return None if self.deferral is None else self.deferral.copies

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
        return linear(deferred, input)


class _DeferringConvolution(Deferring, Convolution):
    def forward(self, input: Tensor) -> Tensor:
        deferred = None if self.weight.is_complex() else self._deferred_weights()
        if deferred is None:
            return self._conv_forward(input, self.weight, self.bias)
        batched = input.dim() == self.weight.dim()
        input, padding = self._pad(input if batched else input.unsqueeze(0))
        geometry = (self.stride, padding, self.dilation, False, (0,) * len(padding), self.groups)
        output = _convolution(*deferred[:3], input, deferred, geometry)
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
        return look_up(deferred, input, self.padding_idx, self.scale_grad_by_freq)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weight: Tensor, bias: Tensor | None, input: Tensor, deferred: DeferredWeights
    ) -> Tensor:
        ctx.deferred = deferred
        input, weight, bias = lowered(input, weight, bias, deferred.deferral.copies)
        ctx.save_for_backward(input, weight)
        return unviewed(functional.linear(input, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])  # shared by all three products
        of_weights = hand_over(ctx, of_linear, input, rows)
        of_input = rows.mm(weight.conj()).view(input.shape) if ctx.needs_input_grad[3] else None
        return None, *of_weights, of_input, None


_linear = applied(_Linear)


def linear(deferred: DeferredWeights, input: Tensor) -> Tensor:
    """`input @ weight.T + bias` of weights that are deferred."""
    return _linear(*deferred[:3], input, deferred)


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input: Tensor,
        deferred: DeferredWeights,
        geometry: tuple[Any, ...],
    ) -> Tensor:
        ctx.deferred, ctx.geometry = deferred, geometry
        input, weight, bias = lowered(input, weight, bias, deferred.deferral.copies)
        ctx.save_for_backward(input, weight)
        return torch.convolution(input, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_weights = hand_over(ctx, of_convolution(*ctx.geometry), input, gradient)
        of_input = None
        if ctx.needs_input_grad[3]:
            backward = torch.ops.aten.convolution_backward
            of_input = backward(gradient, input, weight, None, *ctx.geometry, (True, False, False))[0]
        return None, *of_weights, of_input, None, None


_convolution = applied(_Convolution)


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weight: Tensor,
        bias: None,
        indices: Tensor,
        deferred: DeferredWeights,
        formula: Formula,
    ) -> Tensor:
        ctx.deferred, ctx.formula = deferred, formula
        ctx.save_for_backward(indices)
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        [indices] = ctx.saved_tensors
        return None, *hand_over(ctx, ctx.formula, indices, gradient), None, None, None


_embedding = applied(_Embedding)


def look_up(
    deferred: DeferredWeights, indices: Tensor, padding_index: int | None, scale_by_frequency: bool = False
) -> Tensor:
    """Rows of a weight that defers; row `padding_index` gets no gradient."""
    formula = of_embedding(padding_index, scale_by_frequency)
    return _embedding(*deferred[:3], indices, deferred, formula)


def lowered(
    input: Tensor, weight: Tensor, bias: Tensor | None, copies: Copies | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in autocast's dtype, if autocast is on. Converts a parameter once for all calls that share `copies`,
    as autocast itself does for calls in one region. But autocast's own copies would have no graph, as a function's
    forward has none, and would then be used where they need one.
    """
    if not is_any_autocast_enabled():
        return input, weight, bias
    device = input.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if not enabled or input.dtype is torch.float64 or input.is_complex():
        return input, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return input.to(dtype), _lower(weight, dtype, copies), None if bias is None else _lower(bias, dtype, copies)


def _lower(tensor: Tensor, dtype: torch.dtype, copies: Copies | None) -> Tensor:
    if copies is None or not isinstance(tensor, nn.Parameter):
        return tensor.to(dtype)
    copy = copies.get(tensor)
    if copy is None:
        copy = copies[tensor] = tensor.to(dtype)
    return copy


def hand_over(ctx: Any, formula: Formula, input: Tensor, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Hands the product of this backward to the Deferral of `ctx`, or computes it if that may not wait.

    Args:
        ctx: of a function whose first inputs are those of its `deferred`.
        formula, input, gradient: of the product.

    Returns the gradients of weight and bias for autograd; None for those that are deferred or not wanted. Raises
    UsageError if the backward itself must be differentiated.
    """
    _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    if not wants_weight and not wants_bias:
        return None, None
    _, weight, bias, deferral = ctx.deferred
    with_bias = bias is not None and bias.requires_grad
    if defers(ctx, deferral, (weight, bias) if with_bias else (weight,)):
        if deferral.fuses and formula is of_linear:
            formula = into_gradient
        if deferral.queue is not None:
            deferral.take(product_of(formula, weight, bias if with_bias else None, input, gradient))
            return None, None
    of_weight, *of_bias = formula(weight, input, gradient, with_bias)
    return of_weight, of_bias[0] if with_bias else None


def defers(ctx: Any, deferral: Deferral, parameters: Sequence[nn.Parameter]) -> bool:
    """Returns True if this backward is an I or fuses, and no other code can observe that it leaves the gradients of
    `parameters` out.

    The first inputs of the function of `ctx` are the deferral's anchor and these parameters. Raises UsageError if the
    backward itself must be differentiated.
    """
    if torch.is_grad_enabled():
        raise UsageError(
            "a backward with create_graph=True cannot run through a layer that defers its weight gradient: use a "
            "schedule without W, such as 1f1b, and no gradient_accumulation_fusion, or make the layer an instance of "
            "your own subclass, which does not defer"
        )
    if deferral.queue is None and not deferral.fuses:
        return False
    edges = ctx.next_functions
    if not will_run(edges[0][0]):  # in torch.autograd.grad
        return False
    # torch does not list the hooks of a node. But code that hooks one holds it, and no other code holds the anchor's.
    nobody = getrefcount(edges[0][0])
    for place, parameter in enumerate(parameters, 1):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or getrefcount(edges[place][0]) > nobody:
            return False
    return True
