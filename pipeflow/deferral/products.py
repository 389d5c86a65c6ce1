"""Products: the weight gradients that the backward of a layer leaves for W, how they are added to a parameter's
gradient, and the Deferral that runs them at once or stores them. Must not contain: the layers that make products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from pipeflow.core.errors import UsageError


class Deferred(ABC):
    """Weight gradients that are computed later. Calling it, once, adds them to the parameters' gradients and frees its
    tensors.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def weights(self) -> Sequence[nn.Parameter]:
        """The parameters whose hooks must see the whole gradient of a backward."""

    @property
    @abstractmethod
    def has_hooks(self) -> bool:
        """True if hooks must be called with one of the gradients."""

    @abstractmethod
    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The gradient of each parameter."""

    def __call__(self) -> None:
        for parameter, gradient in self.compute():
            accumulate(parameter, gradient)


class Product(Deferred):
    """The gradients of one layer's weight and bias from one call of the layer. `gradient` is the gradient of the
    layer's output.
    """

    __slots__ = ("bias", "gradient", "input", "versions", "weight")

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, input: Tensor, gradient: Tensor) -> None:
        self.weight = weight
        self.bias = bias
        self.input = input.detach()  # without the graph that made it
        self.gradient = gradient
        self.versions = (input._version, gradient._version)

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """The layer's weight."""
        return (self.weight,)

    @property
    def has_hooks(self) -> bool:
        """True if the weight or the bias has hooks."""
        return has_hooks(self.weight) or (self.bias is not None and has_hooks(self.bias))

    def release(self) -> tuple[Tensor, Tensor]:
        """Returns the input and the gradient and frees them here. Raises UsageError if either was overwritten since."""
        input, gradient = self.input, self.gradient
        del self.input, self.gradient
        if self.versions != (input._version, gradient._version):
            raise UsageError(
                f"the input or the output's gradient of a layer with a weight of shape {tuple(self.weight.shape)} was "
                "modified in place before its weight gradient was computed: modify a copy instead"
            )
        return input, gradient


class LinearProduct(Product):
    """The product of a linear layer. `gradient` is a matrix with a row per row of the input."""

    __slots__ = ()

    def __call__(self) -> None:
        grad = self.weight.grad
        if not _takes_products(grad, self.weight, self.gradient):
            super().__call__()
            return
        columns, rows = self._factors()
        grad.addmm_(columns, rows)
        if self.bias is not None:
            accumulate(self.bias, columns.sum(1))

    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        columns, rows = self._factors()
        of_weight = self.weight, columns.mm(rows)
        return [of_weight] if self.bias is None else [of_weight, (self.bias, columns.sum(1))]

    def _factors(self) -> tuple[Tensor, Tensor]:
        input, gradient = self.release()
        return gradient.t(), input.reshape(gradient.shape[0], input.shape[-1]).conj()  # the same tensor unless complex


class ConvolutionProduct(Product):
    """The product of a convolution. `geometry` is the arguments of torch.convolution after the bias."""

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

    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        input, gradient = self.release()
        weight = self.weight.detach().to(gradient.dtype)  # only its shape and layout are used
        outputs = None if self.bias is None else [gradient.shape[1]]
        wanted = (False, True, self.bias is not None)
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, input, weight, outputs, *self.geometry, wanted
        )
        return [(self.weight, of_weight)] if self.bias is None else [(self.weight, of_weight), (self.bias, of_bias)]


class EmbeddingProduct(Product):
    """The product of an embedding. `input` is the indices. Row `padding_index` gets no gradient; -1 stands for none."""

    __slots__ = ("padding_index", "scale_by_frequency")

    def __init__(
        self, weight: nn.Parameter, input: Tensor, gradient: Tensor, padding_index: int, scale_by_frequency: bool
    ) -> None:
        super().__init__(weight, None, input, gradient)
        self.padding_index = padding_index
        self.scale_by_frequency = scale_by_frequency

    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        indices, gradient = self.release()
        rows, backward = self.weight.shape[0], torch.ops.aten.embedding_dense_backward
        return [(self.weight, backward(gradient, indices, rows, self.padding_index, self.scale_by_frequency))]


class Hooked:
    """The products of one backward whose parameters have hooks. Calling it, once, gives each parameter their sum, so
    that its hooks run once, as in torch.
    """

    __slots__ = ("__weakref__", "products")

    def __init__(self) -> None:
        self.products: list[Deferred] = []

    def __call__(self) -> None:
        sums: dict[nn.Parameter, Tensor] = {}
        products, self.products = self.products, []
        for product in products:
            for parameter, gradient in product.compute():
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        for parameter, gradient in sums.items():
            accumulate(parameter, gradient)


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


def _takes_products(grad: Tensor | None, parameter: nn.Parameter, gradient: Tensor) -> TypeGuard[Tensor]:
    """Returns True if a product with `gradient` may be added to the parameter's `grad` while it is computed."""
    if grad is None or grad.dtype is not gradient.dtype or grad.requires_grad or grad.layout is not torch.strided:
        return False
    return not has_hooks(parameter)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Returns True if the parameter has hooks on its gradient, or hooks that run after accumulation."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Deferral:
    """Receives the weight-gradient products of the layers of one stage.

    While `queue` is None a product runs at once, as in a whole backward B. If `queue` is a list, products are appended
    to it. To run a backward as I, set `queue` before it and reset it after it; calling the products in order is its W.
    Gradients have the same bits either way, except for a parameter that is also used outside the layers that defer: the
    other part of its gradient is then added first. If parameters have hooks, a whole backward runs the products at its
    end.

    Attributes:
        queue: list of products in the order of the backward; None to run each product at once.
        deferred: numbers of elements of the parameters whose gradients are products, by name.
        remaining: the same for other trainable parameters, whose gradients I computes.
        module: weak reference to the module of the layers.
    """

    __slots__ = ("_hooked", "anchor", "deferred", "module", "num_layers", "queue", "remaining")

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.queue: list[Callable[[], None]] | None = None
        self._hooked: WeakValueDictionary[int, Hooked] = WeakValueDictionary()  # by the backward
        self.deferred: Mapping[str, int] = {}
        self.remaining: Mapping[str, int] = {}
        self.num_layers = 0
        # Stands for the weights in the graph, because their hooks would run on the None that a deferring layer returns.
        self.anchor = torch.empty(0, requires_grad=True)

    def take(self, product: Deferred) -> None:
        """Runs or stores `product`; called during a backward."""
        queue = self.queue
        if product.has_hooks:
            self._require_whole(product)
            self._hooked_products().products.append(product)
        elif queue is None:
            product()
        else:
            queue.append(product)

    def _require_whole(self, product: Deferred) -> None:
        """Raises UsageError if autograd adds another part to the weight's gradient in the same backward."""
        for weight in product.weights:
            if torch._C._will_engine_execute_node(get_gradient_edge(weight).node):
                raise UsageError(
                    f"{self._name_of(weight)} has hooks, and is used by a layer that defers its weight gradient "
                    "and by other code, so that no hook would see its whole gradient: make the layer an instance of "
                    "your own subclass, which does not defer"
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        module = self.module()
        named = () if module is None else module.named_parameters()
        return next((repr(name) for name, each in named if each is parameter), "a parameter of no module")

    def _hooked_products(self) -> Hooked:
        """The products of the current backward with hooks; they run at its end, or in its W."""
        backward = torch._C._current_graph_task_id()
        hooked = self._hooked.get(backward)
        if hooked is None:
            hooked = self._hooked[backward] = Hooked()
            if self.queue is None:
                Variable._execution_engine.queue_callback(hooked)
            else:
                self.queue.append(hooked)
        return hooked

    def __str__(self) -> str:
        late, early = sum(self.deferred.values()), sum(self.remaining.values())
        text = f"{late} of {late + early} elements of weight gradients are deferred ({len(self.deferred)} parameters)"
        return f"{text}; not deferred: {', '.join(self.remaining)}" if self.remaining else text
