"""Weight-gradient products: what the backward of a layer leaves for W, how it is added to a parameter's gradient, and
the Deferral that runs it now or keeps it. What must not live here: the layers that make products.
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
    """Weight gradients that are computed later. Called once: adds them to the parameters', and lets go of what they are
    made of.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def weights(self) -> Sequence[nn.Parameter]:
        """The parameters whose hooks are to see the whole gradient of a backward."""

    @property
    @abstractmethod
    def has_hooks(self) -> bool:
        """Whether something is to be called with one of the gradients."""

    @abstractmethod
    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The gradient of each parameter."""

    def __call__(self) -> None:
        for parameter, gradient in self.compute():
            accumulate(parameter, gradient)


class Product(Deferred):
    """The gradient of one layer's weight, and of its bias, from one call of the layer. `gradient` is that of the
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
        """Whether the weight or the bias has some."""
        return has_hooks(self.weight) or (self.bias is not None and has_hooks(self.bias))

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
        return gradient.t(), input.reshape(gradient.shape[0], input.shape[-1]).conj()  # itself, unless it is complex


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

    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        input, gradient = self.release()
        weight = self.weight.detach().to(gradient.dtype)  # for its shape and layout
        outputs = None if self.bias is None else [gradient.shape[1]]
        wanted = (False, True, self.bias is not None)
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, input, weight, outputs, *self.geometry, wanted
        )
        return [(self.weight, of_weight)] if self.bias is None else [(self.weight, of_weight), (self.bias, of_bias)]


class EmbeddingProduct(Product):
    """`input` holds the indices. Rows of `padding_index` get no gradient; -1 for none."""

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
    """The products of one backward whose parameters have hooks. Called once: gives each parameter their sum, so that
    its hooks run once, as torch runs them.
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
    """Adds `gradient`, which nobody else holds, to the parameter's. Autograd does so where it could make a difference:
    it runs hooks, and knows how the first gradient of a parameter must be laid out.
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
    """Whether a product with `gradient` may be added to the parameter's `grad` while it is computed."""
    if grad is None or grad.dtype is not gradient.dtype or grad.requires_grad or grad.layout is not torch.strided:
        return False
    return not has_hooks(parameter)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether something is called with the parameter's gradient, or once it was added."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Deferral:
    """Where the layers of one stage hand their products. While `queue` is None a product runs at once, as in a whole
    backward B; set to a list it collects them: setting it before a backward and resetting it after makes that
    backward an I, and calling the products in order is its W. Gradients have the same bits either way, but for a
    parameter that is also used outside of the layers that defer: the other part of its gradient is then added first.
    Where parameters have hooks, a whole backward runs the products at its end.

    Attributes:
        queue: where products go, in the order of the backward; None to run each at once.
        deferred: the parameters whose gradients are products, by name, with their numbers of elements.
        remaining: the other parameters that want a gradient: they get it inside I.
        module: whose layers they are, as long as it lives.
    """

    __slots__ = ("_hooked", "anchor", "deferred", "module", "num_layers", "queue", "remaining")

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.queue: list[Callable[[], None]] | None = None
        self._hooked: WeakValueDictionary[int, Hooked] = WeakValueDictionary()  # by the backward
        self.deferred: Mapping[str, int] = {}
        self.remaining: Mapping[str, int] = {}
        self.num_layers = 0
        # Stands for the weights in the graph: their own hooks would run on the None that a deferring layer returns.
        self.anchor = torch.empty(0, requires_grad=True)

    def take(self, product: Deferred) -> None:
        """Runs or keeps `product`; called inside a backward."""
        queue = self.queue
        if product.has_hooks:
            self._require_whole(product)
            self._hooked_products().products.append(product)
        elif queue is None:
            product()
        else:
            queue.append(product)

    def _require_whole(self, product: Deferred) -> None:
        """Raises UsageError where autograd gives the weight another part of its gradient in the same backward."""
        for weight in product.weights:
            if torch._C._will_engine_execute_node(get_gradient_edge(weight).node):
                raise UsageError(
                    f"{self._name_of(weight)} has hooks, and is used by a layer that defers its weight gradient "
                    "and by other code, so that no hook would see its whole gradient: make the layer an instance of a "
                    "subclass of its own, which is left as it is"
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        module = self.module()
        named = () if module is None else module.named_parameters()
        return next((repr(name) for name, each in named if each is parameter), "a parameter of no module")

    def _hooked_products(self) -> Hooked:
        """Those of the backward that runs; they are run at its end, or by its W."""
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
        text = f"{late} of {late + early} elements of weight gradients are deferred, {len(self.deferred)} parameters"
        return f"{text}; not: {', '.join(self.remaining)}" if self.remaining else text
