"""Products: the weight gradients that the backward of a layer leaves for W, how they are added to a parameter's
gradient, and the Deferral that stores them. Must not contain: the layers that make products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.torch_private.autograd import backward_id

Gradients = Iterable[tuple[nn.Parameter, Tensor | None]]
"""Parameters, each with its gradient; None if that was added already."""


Deferred = tuple[Sequence[nn.Parameter], Callable[[], Gradients]]
"""Parameters, and a function that computes their gradients, once. It holds the tensors that make them."""

Queue = dict[int, list[Deferred]]
"""What an I has left for its W: by the id of a backward, its products in their order."""

Formula = Callable[[nn.Parameter, Tensor, Tensor, bool], Sequence[Tensor | None]]
"""Computes the gradients of a layer's weight and, if that is wanted, of its bias, from the weight, the input of a call,
and the gradient of its output. None stands for a gradient that it has added itself.
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
    return parameters, partial(_multiplied, formula, parameters, input, gradient, versions)


def _multiplied(
    formula: Formula, parameters: Sequence[nn.Parameter], input: Tensor, gradient: Tensor, versions: tuple[int, int]
) -> Gradients:
    """The gradients of a product. Raises UsageError unless the tensors still have these versions."""
    if versions != (input._version, gradient._version):
        raise UsageError(
            f"the input or the output's gradient of a layer with a weight of shape {tuple(parameters[0].shape)} was "
            "modified in place before its weight gradient was computed: modify a copy instead"
        )
    return zip(parameters, formula(parameters[0], input, gradient, len(parameters) > 1), strict=True)


def of_linear(
    weight: nn.Parameter, input: Tensor, rows: Tensor, with_bias: bool, *, fuses: bool = False
) -> Sequence[Tensor | None]:
    """The Formula of a linear layer. `rows` is a matrix with a row per row of the input. If it fuses, it adds the
    product to the weight's gradient while it computes it, where there is one of the product's dtype.
    """
    columns, matrix = rows.t(), input.reshape(rows.shape[0], input.shape[-1]).conj()  # the same unless complex
    grad = addable(weight) if fuses else None
    if grad is None or grad.dtype is not rows.dtype:
        return (columns.mm(matrix), rows.sum(0)) if with_bias else (columns.mm(matrix),)
    grad.addmm_(columns, matrix)
    return (None, rows.sum(0)) if with_bias else (None,)


into_gradient: Formula = partial(of_linear, fuses=True)


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


def run_products(queue: Queue) -> None:
    """Adds to the gradient of each parameter the sum of its products in a backward, as autograd does at the end of that
    backward: so the gradient has the same bits, unless autocast made several products in another dtype, and hooks run
    once. Empties `queue`.
    """
    for backward in list(queue):
        products = queue.pop(backward)[::-1]
        uses = [id(parameter) for parameters, _ in products for parameter in parameters]
        repeated = {each for each in uses if uses.count(each) > 1} if len(set(uses)) < len(uses) else ()
        sums: dict[int, tuple[nn.Parameter, Tensor]] = {}
        while products:
            for parameter, gradient in products.pop()[1]():
                if gradient is not None and id(parameter) not in repeated:
                    accumulate(parameter, gradient)
                elif gradient is not None:
                    gradient = gradient.to(parameter.grad_dtype)  # also those that autocast made in a shorter dtype
                    before = sums.get(id(parameter))
                    sums[id(parameter)] = parameter, gradient if before is None else before[1] + gradient
        for parameter, gradient in sums.values():
            accumulate(parameter, gradient)


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds `gradient`, which must have no other users, to the parameter's. Uses autograd where it makes a difference:
    it runs hooks, and knows the memory layout of a parameter's first gradient.
    """
    if (grad := addable(parameter)) is not None:
        grad.add_(gradient)
        return
    is_first = parameter.grad is None and not has_hooks(parameter)
    if is_first and gradient.dtype is parameter.grad_dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.backward(gradient)


def addable(parameter: nn.Parameter) -> Tensor | None:
    """The parameter's gradient if it can be added to without autograd."""
    grad = parameter.grad
    if grad is None or grad.requires_grad or grad.layout is not torch.strided:
        return None
    return None if parameter._backward_hooks or parameter._post_accumulate_grad_hooks else grad


def has_hooks(parameter: nn.Parameter) -> bool:
    """Returns True if the parameter has hooks on its gradient, or hooks that run after accumulation."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


Copies = dict[nn.Parameter, Tensor]
"""Parameters, converted to another dtype."""


class Deferral:
    """Receives the weight-gradient products of the layers of one stage.

    To run a backward as I, set `queue` to a Queue before it and reset it to None after it; `run_products` of the queue
    is its W. Gradients have the same bits as those of a whole backward, except for a parameter that is also used
    outside the layers that defer: the other part of its gradient is then added first; and except for one that is used
    several times under autocast: its gradients are then added up in its own dtype, not in autocast's.

    Attributes:
        copies: parameters in autocast's dtype, for all microbatches of a step; None outside of a step.
        active: whether layers may defer in the forwards that follow. If not, each is the plain layer.
        fuses: whether linear layers add the products of their weights to the gradients while these are computed.
        queue: the products of an I; None outside of I.
        deferred: numbers of elements of the parameters whose gradients are products, by name.
        remaining: the same for other trainable parameters, whose gradients I computes.
        module: weak reference to the module of the layers.
    """

    __slots__ = ("active", "anchor", "copies", "deferred", "fuses", "module", "num_layers", "queue", "remaining")

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.copies: Copies | None = None
        self.active = True
        self.fuses = False
        self.queue: Queue | None = None
        self.deferred: Mapping[str, int] = {}
        self.remaining: Mapping[str, int] = {}
        self.num_layers = 0
        # An input of every function of a layer that defers: a backward that comes to it is one of all parameters.
        self.anchor = torch.empty(0, requires_grad=True)

    def take(self, product: Deferred) -> None:
        """Stores `product`, or runs it at once if there is no queue; called during a backward."""
        if self.queue is None:
            run_products({0: [product]})
        else:
            self.queue.setdefault(backward_id(), []).append(product)

    def __str__(self) -> str:
        late, early = sum(self.deferred.values()), sum(self.remaining.values())
        text = f"{late} of {late + early} elements of weight gradients are deferred ({len(self.deferred)} parameters)"
        return f"{text}; not deferred: {', '.join(self.remaining)}" if self.remaining else text
