"""Products: the weight gradients that the backward of a layer leaves for W, how they are added to a parameter's
gradient, and the Deferral that stores them. Must not contain: the layers that make products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.torch_private.autograd import backward_id

Gradients = list[tuple[nn.Parameter, Tensor]]
"""Parameters, each with its gradient."""


class Deferred:
    """Weight gradients that are computed later, once; this frees the tensors that make them.

    Args:
        parameters: the parameters whose gradients these are.
        make: computes the gradients. It holds the tensors that make them.
    """

    __slots__ = ("make", "parameters")

    def __init__(self, parameters: Sequence[nn.Parameter], make: Callable[[], Gradients]) -> None:
        self.parameters = parameters
        self.make = make

    def compute(self) -> Gradients:
        """Computes the gradients of those parameters that have one."""
        make = self.make
        del self.make
        return make()


Formula = Callable[[nn.Parameter, Tensor, Tensor, bool], Sequence[Tensor]]
"""Computes the gradients of a layer's weight and, if that is wanted, of its bias, from the weight, the input of a call,
and the gradient of its output.
"""


def product_of(
    formula: Formula, weight: nn.Parameter, bias: nn.Parameter | None, input: Tensor, gradient: Tensor
) -> Deferred:
    """The gradients of one layer's weight and bias, unless that is None, from one call of the layer. `gradient` is the
    gradient of the layer's output.
    """
    parameters = (weight,) if bias is None else (weight, bias)
    versions = (input._version, gradient._version)
    input = input.detach()  # without the graph that made it
    return Deferred(parameters, partial(_multiplied, formula, parameters, input, gradient, versions))


def _multiplied(
    formula: Formula, parameters: Sequence[nn.Parameter], input: Tensor, gradient: Tensor, versions: tuple[int, int]
) -> Gradients:
    """The gradients of a product. Raises UsageError unless the tensors still have these versions."""
    if versions != (input._version, gradient._version):
        raise UsageError(
            f"the input or the output's gradient of a layer with a weight of shape {tuple(parameters[0].shape)} was "
            "modified in place before its weight gradient was computed: modify a copy instead"
        )
    gradients = formula(parameters[0], input, gradient, len(parameters) > 1)
    return list(zip(parameters, gradients, strict=True))


def of_linear(weight: nn.Parameter, input: Tensor, rows: Tensor, with_bias: bool) -> Sequence[Tensor]:
    """The Formula of a linear layer. `rows` is a matrix with a row per row of the input."""
    of_weight = rows.t().mm(input.reshape(rows.shape[0], input.shape[-1]).conj())  # the same tensor unless complex
    return (of_weight, rows.sum(0)) if with_bias else (of_weight,)


def of_convolution(*geometry: Any) -> Formula:
    """The Formula of a convolution. `geometry` is the arguments of torch.convolution after the bias."""

    def formula(weight: nn.Parameter, input: Tensor, gradient: Tensor, with_bias: bool) -> Sequence[Tensor]:
        like = weight.detach().to(gradient.dtype)  # only its shape and layout are used
        outputs = [gradient.shape[1]] if with_bias else None
        wanted = (False, True, with_bias)
        gradients: Sequence[Tensor] = torch.ops.aten.convolution_backward(
            gradient, input, like, outputs, *geometry, wanted
        )
        return gradients[1:] if with_bias else gradients[1:2]

    return formula


def of_embedding(padding_index: int | None, scale_by_frequency: bool) -> Formula:
    """The Formula of an embedding, whose input is indices. Row `padding_index` gets no gradient."""
    padding = -1 if padding_index is None else padding_index  # torch's number for none

    def formula(weight: nn.Parameter, indices: Tensor, gradient: Tensor, with_bias: bool) -> Sequence[Tensor]:
        backward = torch.ops.aten.embedding_dense_backward
        return (backward(gradient, indices, weight.shape[0], padding, scale_by_frequency),)

    return formula


class Products:
    """The products of one backward, in its order. Calling it, once, adds to the gradient of each parameter the sum of
    its products, as autograd does at the end of a backward: so the gradient has the same bits, unless autocast made
    several products in another dtype, and hooks run once.
    """

    __slots__ = ("backward", "products")

    def __init__(self, backward: int) -> None:
        self.backward = backward
        self.products: list[Deferred] = []

    def __call__(self) -> None:
        products, self.products = self.products, []
        remaining = Counter([id(parameter) for product in products for parameter in product.parameters])
        sums: dict[nn.Parameter, Tensor] = {}
        for product in products:
            for parameter, gradient in product.compute():
                remaining[id(parameter)] -= 1
                if remaining[id(parameter)] or parameter in sums:
                    sums[parameter] = _sum(sums.get(parameter), gradient, parameter)
                else:
                    accumulate(parameter, gradient)
        for parameter, gradient in sums.items():
            accumulate(parameter, gradient)


def _sum(before: Tensor | None, gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Adds up gradients in the dtype of the parameter's gradient, also those that autocast made in a shorter one."""
    gradient = gradient.to(parameter.grad_dtype)
    return gradient if before is None else before + gradient


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds `gradient`, which must have no other users, to the parameter's. Uses autograd where it makes a difference:
    it runs hooks, and knows the memory layout of a parameter's first gradient.
    """
    grad = parameter.grad
    if has_hooks(parameter):
        parameter.backward(gradient)
    elif grad is None and gradient.dtype is parameter.grad_dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    elif grad is None or grad.requires_grad or grad.layout is not torch.strided:
        parameter.backward(gradient)
    else:
        grad.add_(gradient)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Returns True if the parameter has hooks on its gradient, or hooks that run after accumulation."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


Copies = dict[nn.Parameter, Tensor]
"""Parameters, converted to another dtype."""


class Deferral:
    """Receives the weight-gradient products of the layers of one stage.

    To run a backward as I, set `queue` to a list before it and reset it to None after it; calling the list's entries in
    order is its W. Gradients have the same bits as those of a whole backward, except for a parameter that is also used
    outside the layers that defer: the other part of its gradient is then added first; and except for one that is used
    several times under autocast: its gradients are then added up in its own dtype, not in autocast's.

    Attributes:
        copies: parameters in autocast's dtype, for all microbatches of a step; None outside of a step.
        active: whether layers may defer in the forwards that follow. If not, each is the plain layer.
        queue: list of the products of each backward; None outside of I.
        deferred: numbers of elements of the parameters whose gradients are products, by name.
        remaining: the same for other trainable parameters, whose gradients I computes.
        module: weak reference to the module of the layers.
    """

    __slots__ = ("active", "anchor", "copies", "deferred", "module", "num_layers", "queue", "remaining")

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.copies: Copies | None = None
        self.active = True
        self.queue: list[Products] | None = None
        self.deferred: Mapping[str, int] = {}
        self.remaining: Mapping[str, int] = {}
        self.num_layers = 0
        # An input of every function of a layer that defers: a backward that comes to it is one of all parameters.
        self.anchor = torch.empty(0, requires_grad=True)

    def take(self, product: Deferred) -> None:
        """Stores `product`, or runs it at once if there is no queue; called during a backward."""
        backward = backward_id()
        if self.queue is None:
            products = Products(backward)
        else:
            products = next((each for each in self.queue if each.backward == backward), None) or Products(backward)
            if not products.products:
                self.queue.append(products)
        products.products.append(product)
        if self.queue is None:
            products()

    def __str__(self) -> str:
        late, early = sum(self.deferred.values()), sum(self.remaining.values())
        text = f"{late} of {late + early} elements of weight gradients are deferred ({len(self.deferred)} parameters)"
        return f"{text}; not deferred: {', '.join(self.remaining)}" if self.remaining else text
