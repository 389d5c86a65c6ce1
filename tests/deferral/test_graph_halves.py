"""A backward's graph in two halves: what both compute is what autograd computes, and nothing is computed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from pipeflow.engine.deferral.compile_backend import Halves, halves_of, results_of
from tests.deferral.halves import normal

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A function of tensors with these shapes.

    Attributes:
        wanted: which of their gradients may be left to the second half.
        late: which of them are.
    """

    name: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]
    late: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    def inputs(self) -> list[Tensor]:
        """The function's own, and last the gradient of what it returns."""
        made = [normal(*shape, seed=index) for index, shape in enumerate(self.shapes)]
        return [*made, normal(*self.function(*made).shape, seed=99)]

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the function's inputs."""
        leaves = [each.detach().requires_grad_() for each in inputs[:-1]]
        return torch.autograd.grad(self.function(*leaves), leaves, inputs[-1])


def two_layers(input: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    return functional.linear(functional.gelu(functional.linear(input, first, bias)), second)


def attention(input: Tensor, packed: Tensor, output: Tensor) -> Tensor:
    query, key, value = functional.linear(input, packed).chunk(3, -1)
    return functional.linear((query @ key.mT).softmax(-1) @ value, output)


def normed(input: Tensor, weight: Tensor, bias: Tensor, after: Tensor) -> Tensor:
    return functional.linear(functional.layer_norm(input, (5,), weight, bias), after)


def reshaped(input: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(input.reshape(-1, input.shape[-1]), weight).reshape(*input.shape[:-1], -1)


CASES = [
    Case("linear", functional.linear, ((3, 5), (4, 5), (4,)), (1,), (1,)),
    Case("two layers", two_layers, ((2, 3, 5), (6, 5), (6,), (4, 6)), (1, 3), (1, 3)),
    Case("a weight used twice", lambda x, w: x @ w @ w, ((3, 5), (5, 5)), (1,), (1,)),
    Case("attention", attention, ((2, 3, 4), (12, 4), (4, 4)), (1, 2), (1, 2)),
    Case("convolution", functional.conv1d, ((2, 3, 8), (4, 3, 3)), (1,), ()),  # one operator makes both gradients
    Case("norm", normed, ((3, 5), (5,), (5,), (4, 5)), (1, 3), (3,)),
    Case("reshaped", reshaped, ((2, 3, 5), (4, 5)), (1,), (1,)),
    Case("none wanted", functional.linear, ((3, 5), (4, 5)), (), ()),
]


def traced(backward: Callable[..., Any], inputs: list[Tensor], mode: Any = "fake") -> GraphModule:
    """The operators that results of a backward depend on."""
    made = make_fx(backward, tracing_mode=mode)(*inputs)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def operators(graph: GraphModule) -> Counter[str]:
    """How often each operator makes a tensor in it."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(str(node.target) for node in nodes if isinstance(node.meta.get("val"), Tensor))


def run(halves: Halves, inputs: list[Any], count: int) -> list[Any]:
    """The `count` results of a backward, by one half after the other."""
    found = list(halves.of_inputs(*inputs))
    assert all(found[index] is None for index in halves.late)
    rest = halves.of_weights(*(inputs[index] for index in halves.kept), *found[count:])
    for index, result in zip(halves.late, rest, strict=True):
        found[index] = result
    return found[:count]


@pytest.mark.some(6)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_halves_compute_what_autograd_does(case: Case, mode: Any) -> None:
    inputs = case.inputs()
    whole = traced(case.backward, inputs, mode)
    before = whole.code
    halves = halves_of(whole, case.wanted, inputs)
    assert whole.code == before
    if halves is None:
        assert case.late == ()
        return
    assert tuple(halves.late) == case.late
    assert len(halves.examples) == sum(node.op == "placeholder" for node in halves.of_weights.graph.nodes)
    expected = case.backward(*inputs)
    for mine, its in zip(run(halves, inputs, len(expected)), expected, strict=True):
        assert torch.equal(mine, its)
    assert operators(halves.of_inputs) + operators(halves.of_weights) == operators(whole)


def test_the_second_half_has_what_it_needs_and_no_more() -> None:
    """Of a linear layer: its input and the gradient of its output, not its weight."""
    case = CASES[0]
    inputs = case.inputs()
    halves = halves_of(traced(case.backward, inputs), case.wanted, inputs)
    assert halves is not None
    needed = [inputs[index] for index in halves.kept] + halves.examples[len(halves.kept) :]
    assert sum(each.numel() for each in needed) == 3 * 5 + 3 * 4


def test_a_result_that_another_one_needs_is_computed_with_it() -> None:
    def backward(input: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        product = gradient.t() @ input
        return product.sum(), product

    inputs = [normal(3, 5), normal(3, 4, seed=1)]
    assert halves_of(traced(backward, inputs), [1], inputs) is None


def test_a_result_that_is_an_argument_is_not_left_for_later() -> None:
    inputs = [normal(3, 5), normal(3, 4, seed=1)]
    assert halves_of(traced(lambda input, gradient: (input * 2, gradient), inputs), [1], inputs) is None


def test_a_result_that_is_written_into_an_argument_is_computed_first() -> None:
    def backward(input: Tensor, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        product = gradient.t() @ input
        aten.copy_(kept, product)
        return gradient * 2, product

    inputs = [normal(3, 5), normal(3, 4, seed=1), torch.zeros(4, 5, dtype=torch.float64)]
    assert halves_of(traced(backward, inputs), [1], inputs) is None


def test_what_is_written_in_place_is_written_in_the_first_half() -> None:
    """So it is once the backward is over, and the second half reads what was there before it."""

    def backward(input: Tensor, gradient: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        aten.copy_(count, count + 1)
        return gradient * 2, gradient.t() @ input

    inputs = [normal(3, 5), normal(3, 4, seed=1), torch.zeros(1)]
    halves = halves_of(traced(backward, inputs), [1], inputs)
    assert halves is not None
    found = halves.of_inputs(*inputs)
    assert inputs[2].item() == 1.0
    [late] = halves.of_weights(*(inputs[index] for index in halves.kept), *found[2:])
    assert torch.equal(late, inputs[1].t() @ inputs[0])
    assert inputs[2].item() == 1.0


def test_results_are_those_of_the_graph() -> None:
    graph = make_fx(lambda input: (input + 1, None), tracing_mode="fake")(normal(2))
    first, second = results_of(graph)
    assert first.target is aten.add.Tensor
    assert second is None
