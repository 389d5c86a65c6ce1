"""Code that a deferring backend compiles: its weight gradients wait, are right, and free what they were made of."""

from __future__ import annotations

from functools import partial
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.engine.deferral.compile_backend import (
    _LATE,
    CompiledCall,
    DeferringBackend,
    compiled_gradients,
    deferring_backend,
    is_compiled,
    late_gradients,
    waits,
)
from pipeflow.engine.deferral.module import defer_weight_gradients
from pipeflow.engine.deferral.products import Deferral, run_products
from tests.compiling import COMPILED
from tests.deferral.halves import collecting, gradients, normal, products_of, require_near

pytestmark = COMPILED


class Block(nn.Module):
    """Two layers, of which the second is used twice, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.twice(functional.gelu(self.twice(self.norm(self.first(input)))))
        return output


class Tied(nn.Module):
    """The second layer's weight is the first one's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(5, 4), nn.Parameter(torch.zeros(5))

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(self.first(input).sin(), self.first.weight.t(), self.bias)


def compiled(module: nn.Module) -> Deferral:
    """Compiles the module in place; its weight gradients go to the Deferral that it gives."""
    backend = DeferringBackend("aot_eager", {})
    deferral = defer_weight_gradients(module)
    code = torch.compile(nn.Module._call_impl, backend=backend, fullgraph=True)
    module._compiled_call_impl = CompiledCall(module, code, backend, deferral)
    return defer_weight_gradients(module, deferral)


def made(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind().double(), normal(3, 5).requires_grad_()


def steps(module: nn.Module, input: Tensor) -> None:
    """Two backwards."""
    for microbatch in range(2):
        output = module(input)
        output.backward(normal(*output.shape, seed=1 + microbatch))


@pytest.mark.parametrize("kind", [Block, Tied])
def test_whole_and_split_backwards_make_the_gradients_of_eager_ones(kind: type[nn.Module]) -> None:
    module, input = made(kind)
    steps(module, input)
    expected = gradients(module, input)
    module, input = made(kind)
    deferral = compiled(module)
    steps(module, input)
    require_near(gradients(module, input), expected)
    module.zero_grad()
    input.grad = None
    with collecting(deferral) as queue:
        steps(module, input)
    late = {name for name, each in module.named_parameters() if each.dim() == 2}
    assert gradients(module, input).keys() == expected.keys() - late
    assert set(deferral.deferred) == late
    assert set(deferral.remaining) == {name for name, _ in module.named_parameters()} - late
    run_products(queue)
    require_near(gradients(module, input), expected)


@pytest.mark.exhaustive
def test_a_second_half_frees_what_it_computes_from() -> None:
    module, input = made(Block)
    deferral = compiled(module)
    with collecting(deferral) as queue:
        steps(module, input)
    products = products_of(queue)
    assert len(products) == 2
    given = [each for _, make in products if isinstance(make, partial) for each in make.args[1]]
    lates = [getattr(each, _LATE) for each in given if hasattr(each, _LATE)]
    held = [ref(each) for late in lates for each in late.args[2] if each is not input]
    del given, lates
    assert held
    assert all(each() is not None for each in held)
    products[0][1]()
    assert 0 < sum(each() is not None for each in held) < len(held)
    products[1][1]()
    assert all(each() is None for each in held)


@pytest.mark.exhaustive
def test_a_late_gradient_shares_no_memory_with_another() -> None:
    shared = normal(2, 2)
    found = late_gradients(lambda arguments: [shared, shared], [3, 1], [shared])
    assert found.keys() == {1, 3}
    assert all(torch.equal(each, shared) for each in found.values())
    assert found[1].data_ptr() != found[3].data_ptr()


@pytest.mark.exhaustive
def test_a_gradient_that_is_there_already_is_copied() -> None:
    weight, gradient = nn.Parameter(normal(2, 2)), normal(2, 2, seed=1)
    [(found, copied)] = compiled_gradients([weight], [gradient])
    assert found is weight
    assert torch.equal(copied, gradient)
    assert copied.data_ptr() != gradient.data_ptr()


@pytest.mark.exhaustive
def test_hooks_see_the_whole_gradient_once() -> None:
    """Also that of a weight that other code uses, too."""
    module, input = made(Block)
    loss = module(input).sum() + module.get_parameter("twice.weight").square().sum()
    loss.backward()
    expected = module.get_parameter("twice.weight").grad
    module, input = made(Block)
    deferral = compiled(module)
    seen: list[Tensor] = []
    weight = module.get_parameter("twice.weight")
    weight.register_hook(seen.append)
    with collecting(deferral) as queue:
        (module(input).sum() + weight.square().sum()).backward()
    assert not queue
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.exhaustive
def test_torch_autograd_grad_finds_the_gradients_of_weights() -> None:
    module, input = made(Block)
    expected = torch.autograd.grad(module(input).square().sum(), list(module.parameters()))
    module, input = made(Block)
    deferral = compiled(module)
    with collecting(deferral) as queue:
        found = torch.autograd.grad(module(input).square().sum(), list(module.parameters()), materialize_grads=True)
    assert not queue
    torch.testing.assert_close(found, expected)


def test_which_parameters_wait() -> None:
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    assert waits(matrix)
    assert not waits(vector)
    assert not waits(matrix.detach().requires_grad_())
    assert not waits(nn.Parameter(torch.zeros(2, 2), requires_grad=False))


@pytest.mark.exhaustive
def test_modules_share_a_backend_of_the_same_options() -> None:
    first = deferring_backend("inductor", (("max_autotune", True),))
    assert deferring_backend("inductor", (("max_autotune", True),)) is first
    assert deferring_backend("inductor", ()) is not first


def test_which_modules_are_compiled() -> None:
    module = nn.Linear(2, 2)
    assert not is_compiled(module)
    assert is_compiled(torch.compile(module, backend="eager"))  # type: ignore[arg-type]  # a module
    assert not is_compiled(module)
    module.compile(backend="eager")
    assert is_compiled(module)
