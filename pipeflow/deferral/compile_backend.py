"""Compiled code that defers: a backend of torch.compile whose backwards leave weight gradients to a Deferral. Must not
contain: how a backward is split, and which modules are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx import GraphModule

from pipeflow.deferral.compilers import COMPILERS, Code, Compiler
from pipeflow.deferral.halves import Halves, halves_of, results_of
from pipeflow.deferral.layers import defers
from pipeflow.deferral.products import Deferral, Deferred


class DeferringBackend:
    """A backend of torch.compile: "inductor" with its options, or "aot_eager". Code called inside `deferring` leaves
    the gradients of weights, which are parameters with two or more dimensions, to a Deferral. Gradients of other
    parameters, such as biases and norms, are computed with the input's gradient, because they are only sums.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._compile = COMPILERS[name]
        self._options = options
        self._now = _Now()

    @contextmanager
    def deferring(self, deferral: Deferral) -> Iterator[None]:
        """Inside, compiled code that this thread calls hands its weight gradients to `deferral`."""
        before, self._now.deferral = self._now.deferral, deferral
        try:
            yield
        finally:
            self._now.deferral = before

    def __call__(self, graph: GraphModule, examples: Sequence[Any]) -> Code:
        """Compiles a graph, as torch.compile requests."""
        places = [index for index, example in enumerate(examples) if waits(example)]
        compiled = self._compile(graph, examples, _Splitter(graph, examples, places), self._options)
        now = self._now

        def run(*arguments: Any) -> Any:
            if now.deferral is None or not torch.is_grad_enabled():
                return compiled(*arguments)
            given = list(arguments)
            parameters = [given[index] for index in places]
            deferred = DeferredParameters(now.deferral, parameters)
            weights: tuple[Tensor, ...] = _Weights.apply(now.deferral.anchor, *parameters, deferred)  # type: ignore[no-untyped-call]  # torch's
            for index, weight in zip(places, weights, strict=True):
                given[index] = weight
            return compiled(*given)

        return run if places else compiled


@cache
def deferring_backend(name: str, options: tuple[tuple[str, Any], ...]) -> DeferringBackend:
    """The backend with this name and these options. All modules and threads share one backend, so that equal modules
    share code.
    """
    return DeferringBackend(name, dict(options))


class CompiledCall:
    """The compiled call of a module. If its backend defers, weight gradients go to `deferral`."""

    def __init__(self, module: nn.Module, code: Code, backend: DeferringBackend | None, deferral: Deferral) -> None:
        self._module = module
        self._code = code
        self._backend = backend
        self._deferral = deferral

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the compiled module. Weight gradients go to its deferral if the backend splits backwards."""
        if self._backend is None:
            return self._code(self._module, *arguments, **keywords)
        with self._backend.deferring(self._deferral):
            return self._code(self._module, *arguments, **keywords)

    def waits(self, parameter: nn.Parameter) -> bool:
        """Returns True if the gradient of this parameter of the module is deferred."""
        return self._backend is not None and waits(parameter)


@runtime_checkable
class Opaque(Protocol):
    """A layer that torch.compile may not trace, because it waits for other ranks."""

    @property
    def compiles(self) -> bool:
        """True if it can be traced after all."""
        ...

    def leave_eager(self) -> None:
        """Makes compiled code call the layer uncompiled."""
        ...


def is_compiled(module: nn.Module) -> bool:
    """Returns True if torch.compile was applied to the module, by any code."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules  # the wrapped module


class _Now(local):
    deferral: Deferral | None = None


def waits(parameter: object) -> bool:
    """Returns True if compiled code defers the gradient of the parameter."""
    return type(parameter) is nn.Parameter and parameter.requires_grad and parameter.dim() >= 2


class DeferredParameters(NamedTuple):
    """The weights of a call and their Deferral. A tuple, so that the backward gets the parameters themselves."""

    deferral: Deferral
    parameters: list[nn.Parameter]


class _Weights(Function):
    """Stands for the weights in the graph, and receives the parts of their gradients from the compiled backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        *_, ctx.deferred = parameters
        ctx.set_materialize_grads(False)
        return tuple([parameter.detach() for parameter in ctx.deferred.parameters])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        deferral, parameters = ctx.deferred
        product = CompiledProduct(parameters, gradients)
        if defers(ctx, deferral, product):
            deferral.take(product)
            return (None,) * (2 + len(parameters))
        found = dict(product.compute())
        return None, *map(found.get, parameters), None


class CompiledProduct(Deferred):
    """The weight gradients of one call of compiled code: each is a gradient or, for the first of the deferred ones, a
    Late.
    """

    __slots__ = ("_gradients", "_weights")

    def __init__(self, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        self._weights = weights
        self._gradients = gradients

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The weights whose gradients the products compute."""
        return self._weights

    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        gradients, self._gradients = self._gradients, ()
        found: list[tuple[nn.Parameter, Tensor]] = []
        for place, gradient in enumerate(gradients):
            late: Late | None = getattr(gradient, _LATE, None)
            if late is not None:
                found += [(self._weights[index], each) for index, each in late.compute().items()]
            elif gradient is not None:
                found.append((self._weights[place], gradient.clone()))  # others may hold it, too
        return found


_LATE = "_pipeflow_late"  # the attribute of a gradient that holds its Late


class Late:
    """Computes gradients in a second half: its code, and the places of the weights whose gradients it computes."""

    __slots__ = ("_arguments", "_code", "_places")

    def __init__(self, code: Code, places: Sequence[int], arguments: list[Any]) -> None:
        self._code = code
        self._places = places
        self._arguments = arguments

    @torch.no_grad()
    def compute(self) -> dict[int, Tensor]:
        """The gradients by the weights' places; no two of them share memory."""
        arguments, self._arguments = self._arguments, []
        found: dict[int, Tensor] = {}
        seen: set[int] = set()
        for place, gradient in zip(self._places, self._code(arguments), strict=True):
            found[place] = gradient.clone() if gradient.data_ptr() in seen else gradient
            seen.add(gradient.data_ptr())
        return found


class _Splitter:
    """Compiles the backward of a graph in two halves, if the backward returns the gradients of the graph's inputs in
    their order.

    Args:
        graph: the graph that was given to the backend.
        examples: its inputs.
        places: the indices of those inputs that are weights.
    """

    def __init__(self, graph: GraphModule, examples: Sequence[Any], places: Sequence[int]) -> None:
        before = len(list(graph.parameters())) + len(list(graph.buffers()))
        self._weights = {before + index: place for place, index in enumerate(places)}  # by index in the results
        self._shapes = {before + index: examples[index].shape for index in places}

    def __call__(self, backward: GraphModule, examples: Sequence[Any], compiler: Compiler) -> Code:
        """The code of a backward, made by `compiler`."""
        halves = halves_of(backward, self._wanted(backward), examples)
        if halves is None:
            return compiler(backward, examples, ())
        first = compiler(halves.of_inputs, examples, halves.kept)
        second = compiler(halves.of_weights, halves.examples, None)
        return self._joined(halves, first, second)

    def _wanted(self, backward: GraphModule) -> list[int]:
        results = results_of(backward)
        if len(results) <= max(self._weights, default=0):
            return []
        looks = {index: results[index].meta["val"] for index in self._weights if results[index] is not None}
        return list(looks) if all(look.shape == self._shapes[index] for index, look in looks.items()) else []

    def _joined(self, halves: Halves, first: Code, second: Code) -> Code:
        """The backward as one function. It returns nothing for weights except, in the place of the first one, a tensor
        that carries a Late.
        """
        places = [self._weights[index] for index in halves.late]
        count = len(results_of(halves.of_inputs)) - (len(halves.examples) - len(halves.kept))
        carrier, look = halves.late[0], results_of(halves.of_weights)[0].meta["val"]
        shape, dtype, device = tuple(map(int, look.shape)), look.dtype, look.device

        def backward(arguments: list[Any]) -> list[Any]:
            held = [arguments[index] for index in halves.kept]
            found = list(first(arguments))
            held += found[count:]
            del found[count:]
            found[carrier] = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
            setattr(found[carrier], _LATE, Late(second, places, held))
            return found

        backward._boxed_call = True  # type: ignore[attr-defined]  # torch's mark of code that takes a list
        return backward
