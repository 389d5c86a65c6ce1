"""Weight-gradient products: what the backward of a layer leaves for W, how it is added to a parameter's gradient, and
the Deferral that runs it now or keeps it. What must not live here: the layers that make products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError


class Product(ABC):
    """The gradient of one layer's weight, and of its bias, from one backward. Called once; it then lets go of what
    it is made of. `gradient` is that of the layer's output.
    """

    __slots__ = ("bias", "gradient", "input", "versions", "weight")

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, input: Tensor, gradient: Tensor) -> None:
        self.weight = weight
        self.bias = bias
        self.input = input.detach()  # without the graph that made it
        self.gradient = gradient
        self.versions = (input._version, gradient._version)

    @abstractmethod
    def __call__(self) -> None: ...

    def release(self) -> tuple[Tensor, Tensor]:
        """The input and the gradient, no longer held. Raises UsageError where either was overwritten since."""
        input, gradient = self.input, self.gradient
        del self.input, self.gradient
        if self.versions != (input._version, gradient._version):
            raise UsageError(
                f"the input or the output's gradient of a layer with a weight of shape {tuple(self.weight.shape)} was "
                "modified in place before its weight gradient was computed: modify a copy instead"
            )
        return input, gradient


class LinearProduct(Product):
    """`gradient` is a matrix here: one row per row of the input."""

    __slots__ = ()

    def __call__(self) -> None:
        input, gradient = self.release()
        rows = input.reshape(gradient.shape[0], input.shape[-1]).conj()  # itself, unless it is complex
        grad = self.weight.grad
        if _takes_products(grad, self.weight, gradient):
            grad.addmm_(gradient.t(), rows)
        else:
            accumulate(self.weight, gradient.t().mm(rows))
        if self.bias is not None:
            accumulate(self.bias, gradient.sum(0))


class ConvolutionProduct(Product):
    """`geometry`: what torch.convolution takes after the bias."""

    __slots__ = ("geometry",)

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        input: Tensor,
        gradient: Tensor,
        geometry: tuple[Any, ...],
    ) -> None:
        super().__init__(weight, bias, input, gradient)
        self.geometry = geometry

    def __call__(self) -> None:
        input, gradient = self.release()
        weight = self.weight.detach().to(gradient.dtype)  # for its shape and layout
        outputs = None if self.bias is None else [gradient.shape[1]]
        wanted = (False, True, self.bias is not None)
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, input, weight, outputs, *self.geometry, wanted
        )
        accumulate(self.weight, of_weight)
        if self.bias is not None:
            accumulate(self.bias, of_bias)


class EmbeddingProduct(Product):
    """`input` holds the indices. Rows of `padding_index` get no gradient; -1 for none."""

    __slots__ = ("padding_index", "scale_by_frequency")

    def __init__(
        self, weight: nn.Parameter, input: Tensor, gradient: Tensor, padding_index: int, scale_by_frequency: bool
    ) -> None:
        super().__init__(weight, None, input, gradient)
        self.padding_index = padding_index
        self.scale_by_frequency = scale_by_frequency

    def __call__(self) -> None:
        indices, gradient = self.release()
        accumulate(
            self.weight,
            torch.ops.aten.embedding_dense_backward(
                gradient, indices, self.weight.shape[0], self.padding_index, self.scale_by_frequency
            ),
        )


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds `gradient`, which nobody else holds, to the parameter's. Autograd does so where it could make a difference:
    it runs hooks, and knows how the first gradient of a parameter must be laid out.
    """
    grad = parameter.grad
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        parameter.backward(gradient)
    elif grad is None and gradient.dtype is parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    elif grad is None or grad.requires_grad or grad.layout is not torch.strided:
        parameter.backward(gradient)
    else:
        grad.add_(gradient)


def _takes_products(grad: Tensor | None, parameter: nn.Parameter, gradient: Tensor) -> TypeGuard[Tensor]:
    """Whether a product with `gradient` may be added to the parameter's `grad` while it is computed."""
    if grad is None or grad.dtype is not gradient.dtype or grad.requires_grad or grad.layout is not torch.strided:
        return False
    return not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Deferral:
    """Where the layers of one stage hand their products. While `queue` is None a product runs at once, as in a whole
    backward B; set to a list it collects them: setting it before a backward and resetting it after makes that
    backward an I, and calling the products in order is its W. Gradients have the same bits either way, but for a
    parameter that is also used outside of the layers that defer: the other part of its gradient is then added first.

    Attributes:
        queue: where products go, in the order of the backward; None to run each at once.
        deferred: the parameters whose gradients are products, by name, with their numbers of elements.
        remaining: the other parameters that want a gradient: they get it inside I.
    """

    __slots__ = ("anchor", "deferred", "num_layers", "queue", "remaining")

    def __init__(self) -> None:
        self.queue: list[Product] | None = None
        self.deferred: Mapping[str, int] = {}
        self.remaining: Mapping[str, int] = {}
        self.num_layers = 0
        # Stands for the weights in the graph: their own hooks would run on the None that a deferring layer returns.
        self.anchor = torch.empty(0, requires_grad=True)

    def take(self, product: Product) -> None:
        """Runs or keeps `product`."""
        queue = self.queue
        if queue is None:
            product()
        else:
            queue.append(product)

    def __str__(self) -> str:
        late, early = sum(self.deferred.values()), sum(self.remaining.values())
        text = f"{late} of {late + early} elements of weight gradients are deferred, {len(self.deferred)} parameters"
        return f"{text}; not: {', '.join(self.remaining)}" if self.remaining else text
