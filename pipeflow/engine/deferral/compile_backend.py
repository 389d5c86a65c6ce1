"""Compiled code that defers: a backend of torch.compile whose backwards leave weight gradients to a Deferral. A
compiled backward is split into two graphs, one for the gradients of inputs and one for those of weights; torch's own
backends compile both. Must not contain: which modules are compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import local
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx import Graph, GraphModule, Node

from pipeflow.engine.deferral.layers import defers
from pipeflow.engine.deferral.products import Deferral


class Halves(NamedTuple):
    """The two graphs of a backward.

    Attributes:
        of_inputs: takes the arguments of the whole backward and returns its results, with None in the places of `late`,
            then the values that the other half needs.
        of_weights: takes the arguments `kept` of the backward, then those values; returns the results `late`.
        kept: indices of the backward's arguments that the second half needs.
        late: indices of the backward's results that the second half computes.
        examples: example arguments of the second half for its compilation.
    """

    of_inputs: GraphModule
    of_weights: GraphModule
    kept: list[int]
    late: list[int]
    examples: list[Any]


def halves_of(backward: GraphModule, wanted: Collection[int], arguments: Sequence[Any]) -> Halves | None:
    """Splits a backward so that the second half computes those results in `wanted` that no other result needs. Returns
    None if there are none.

    Args:
        backward: a graph of operators, as AOTAutograd makes it; it is not changed.
        wanted: indices of results.
        arguments: example arguments of the backward.
    """
    nodes = list(backward.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    results = results_of(backward)
    early = _ancestors(
        [each for index, each in enumerate(results) if index not in wanted and isinstance(each, Node)]
        + [node for node in nodes if node.op == "call_function" and node.is_impure()]
    )
    early |= {node for node in nodes if node.target is operator.getitem and node.args[0] in early}
    late = [
        index
        for index in sorted(wanted)
        if isinstance(results[index], Node) and results[index] not in early and results[index] not in places
    ]
    if not late:
        return None
    second = _ancestors([results[index] for index in late], until=early | set(places))
    used = {source for node in second for source in node.all_input_nodes} - second
    kept = [index for index, node in enumerate(places) if node in used or not _is_tensor(node)]
    passed = [node for node in nodes if node in used and node not in places]
    return Halves(
        _graph(backward, [None if index in late else each for index, each in enumerate(results)] + passed),
        _graph(backward, [results[index] for index in late], taken=[places[index] for index in kept] + passed),
        kept,
        late,
        [arguments[index] for index in kept] + [node.meta["val"] for node in passed],
    )


def results_of(graph: GraphModule) -> list[Any]:
    """The nodes that a graph returns."""
    output = next(iter(reversed(graph.graph.nodes)))  # torch 2.11 returns no iterator
    return list(output.args[0])


def _ancestors(results: Iterable[Node], until: Collection[Node] = ()) -> set[Node]:
    """The nodes that `results` depend on, including themselves. The walk stops at tensors and arguments in `until`;
    numbers, such as sizes, and attributes of the graph are computed again instead.
    """
    found: set[Node] = set()
    ahead = list(results)
    while ahead:
        node = ahead.pop()
        if node in found or (node in until and (node.op == "placeholder" or _is_tensor(node))):
            continue
        found.add(node)
        ahead.extend(node.all_input_nodes)
    return found


def _is_tensor(node: Node) -> bool:
    return node.op != "get_attr" and isinstance(node.meta.get("val"), Tensor)


def _graph(backward: GraphModule, results: Sequence[Any], taken: Sequence[Node] | None = None) -> GraphModule:
    """The part of the backward that computes `results`, from its own arguments or from the nodes `taken`."""
    made, copies = Graph(), dict[Node, Node]()
    for node in taken or ():
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in backward.graph.nodes:
        is_mine = node.op != "output" and node not in copies and (taken is None or node.op != "placeholder")
        if is_mine and all(source in copies for source in node.all_input_nodes):
            copies[node] = made.node_copy(node, copies.__getitem__)
    output = made.output(tuple([copies[each] if isinstance(each, Node) else each for each in results]))
    output.meta["user_visible_output_idxs"] = [index for index, each in enumerate(results) if isinstance(each, Node)]
    made.eliminate_dead_code()
    return GraphModule(backward, made)


Code = Callable[..., Any]
Compiler = Callable[[GraphModule, Sequence[Any], "Collection[int] | None"], Code]
"""Compiles a graph, given example arguments and the indices of those that are needed afterwards, or None for all. The
code takes its arguments in a list, which it empties.
"""
Split = Callable[[GraphModule, Sequence[Any], Compiler], Code]
"""Makes the code of a backward with a compiler, given example arguments."""


def by_inductor(graph: GraphModule, examples: Sequence[Any], split: Split, options: dict[str, Any]) -> Code:
    """Compiles with inductor and its options."""
    from pipeflow.engine.torch_private.compilers import compile_fx, compile_fx_inner, functorch_config

    def compiled(graph: GraphModule, examples: Sequence[Any], **keywords: Any) -> Any:
        def half(graph: GraphModule, examples: Sequence[Any], held: Collection[int] | None) -> Code:
            # Part of inductor's cache key: code that does not hold an argument may overwrite it.
            static = [index for index in keywords["static_input_idxs"] if held is not None and index not in held]
            with _not_overwritten(held):
                return cast(Code, compile_fx_inner(graph, examples, **{**keywords, "static_input_idxs": static}))

        if keywords.get("is_backward"):
            return split(graph, examples, half)
        return compile_fx_inner(graph, examples, **keywords)

    with functorch_config.patch(enable_autograd_cache=False):  # that cache stores whole backwards
        return cast(Code, compile_fx(graph, examples, inner_compile=compiled, config_patches=options))


@contextmanager
def _not_overwritten(held: Collection[int] | None) -> Iterator[None]:
    """Inside, a backward is compiled that does not overwrite its arguments `held`; None stands for all arguments."""
    from pipeflow.engine.torch_private.compilers import graph_metadata

    metadata = graph_metadata()
    donated = metadata.bw_donated_idxs
    metadata.bw_donated_idxs = [index for index in donated or () if held is not None and index not in held]
    try:
        yield
    finally:
        metadata.bw_donated_idxs = donated


def by_aot_eager(graph: GraphModule, examples: Sequence[Any], split: Split, options: dict[str, Any]) -> Code:
    """Runs torch's operators one after the other; this shows the graphs that AOTAutograd makes."""
    from pipeflow.engine.torch_private.compilers import aot_autograd, boxed_nop, min_cut_rematerialization_partition

    def half(graph: GraphModule, examples: Sequence[Any], held: Collection[int] | None) -> Code:
        return boxed_nop(graph, list(examples))

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=lambda graph, examples: split(graph, examples, half),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, examples)


COMPILERS: Mapping[str, Callable[[GraphModule, Sequence[Any], Split, dict[str, Any]], Code]] = {
    "inductor": by_inductor,
    "aot_eager": by_aot_eager,
}
"""By name of the backend: the function that compiles a graph, given example arguments, a Split and options."""


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
            deferred = now.deferral, parameters  # a tuple, so that the backward gets the parameters themselves
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


class _Weights(Function):
    """Stands for the weights in the graph, and receives the parts of their gradients from the compiled backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        *_, ctx.deferred = parameters
        ctx.set_materialize_grads(False)
        return tuple([parameter.detach() for parameter in ctx.deferred[1]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        deferral, parameters = ctx.deferred
        if defers(ctx, deferral, parameters) and deferral.queue is not None:
            deferral.take((parameters, partial(compiled_gradients, parameters, gradients)))
            return (None,) * (2 + len(parameters))
        found = dict(compiled_gradients(parameters, gradients))
        return None, *map(found.get, parameters), None


_LATE = "_pipeflow_late"  # the attribute of a gradient with a function that computes those of a second half


def compiled_gradients(
    weights: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
) -> list[tuple[nn.Parameter, Tensor]]:
    """The weight gradients of one call of compiled code, whose backward has returned `gradients`. The first of those
    that are deferred computes them all.
    """
    found = []
    for weight, gradient in zip(weights, gradients, strict=True):
        late: Callable[[], dict[int, Tensor]] | None = getattr(gradient, _LATE, None)
        if late is not None:
            found += [(weights[place], each) for place, each in late().items()]
        elif gradient is not None:
            found.append((weight, gradient.clone()))  # others may hold it, too
    return found


@torch.no_grad()
def late_gradients(code: Code, places: Sequence[int], arguments: list[Any]) -> dict[int, Tensor]:
    """What a second half computes, by the places of the weights whose gradients these are; no two share memory."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    for place, gradient in zip(places, code(arguments), strict=True):
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
        that carries the function of the second half.
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
            setattr(found[carrier], _LATE, partial(late_gradients, second, places, held))
            return found

        backward._boxed_call = True  # type: ignore[attr-defined]  # torch's mark of code that takes a list
        return backward
