"""Products that are added to gradients while they are computed: whole backwards and halves do so alike, and only where
nobody sees it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeflow.engine.deferral.module import defer_weight_gradients
from pipeflow.engine.deferral.products import run_products
from tests.deferral.halves import (
    CASES,
    TIED,
    Case,
    Operations,
    backward,
    collecting,
    gradients,
    halves,
    linear,
    normal,
    require_same_bits,
    whole,
)

LONG = linear("longer than a block of a product", lambda: normal(600, 5))


def fused(step: Callable[..., None], module: nn.Module, input: Tensor) -> dict[str, Tensor]:
    module, input = copy.deepcopy(module), input.detach().requires_grad_(input.requires_grad)
    defer_weight_gradients(module).fuses = True
    step(module, input)
    return gradients(module, input)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", [*CASES, TIED, LONG], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_halves_have_the_bits_of_the_whole_and_nearly_those_of_torch(case: Case, dtype: torch.dtype) -> None:
    module, input = case.module(dtype), case.inputs(dtype)
    found = fused(whole, module, input)
    require_same_bits(fused(halves, module, input), found)
    whole(module, input)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for name, gradient in gradients(module, input).items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


def run(module: nn.Module, input: Tensor, *, in_halves: bool) -> list[str]:
    """The operations of a backward."""
    deferral = defer_weight_gradients(module)
    deferral.fuses = True
    with Operations() as seen, collecting(deferral, when=in_halves) as queue:
        backward(module, input, 0)
        run_products(queue)
    names: list[str] = seen.names
    return names


@pytest.mark.parametrize("in_halves", [False, True])
def test_a_product_is_added_while_it_is_computed_once_there_is_a_gradient(in_halves: bool) -> None:
    module, input = nn.Linear(5, 4), normal(3, 5, dtype=torch.float32)
    first, second = (run(module, input, in_halves=in_halves) for _ in range(2))
    assert (first.count("mm"), first.count("addmm_")) == (1, 0)
    assert (second.count("mm"), second.count("addmm_")) == (0, 1)
    assert second.count("add_") == 1  # of the bias


@pytest.mark.parametrize("in_halves", [False, True])
def test_a_gradient_in_other_memory_stays_there(in_halves: bool) -> None:
    """As one that is a view of a buffer."""
    module, buffer = nn.Linear(5, 4), torch.zeros(24)
    module.weight.grad, module.bias.grad = buffer[:20].view(4, 5), buffer[20:]
    run(module, torch.ones(3, 5), in_halves=in_halves)
    plain = nn.Linear(5, 4)
    backward(plain, torch.ones(3, 5), 0)
    found = gradients(plain, torch.ones(3, 5))
    assert torch.equal(buffer[:20].view(4, 5), found["weight"])
    assert torch.equal(buffer[20:], found["bias"])


def hooked(module: nn.Linear) -> object:
    return module.weight.register_hook(lambda gradient: 2 * gradient)


def hooked_after(module: nn.Linear) -> object:
    def double(weight: Tensor) -> None:
        weight.grad = None if weight.grad is None else 2 * weight.grad

    return module.weight.register_post_accumulate_grad_hook(double)


def hooked_node(module: nn.Linear) -> object:
    node = get_gradient_edge(module.weight).node
    node.register_prehook(lambda gradients: (2 * gradients[0],))
    return node


def in_float64(module: nn.Linear) -> None:
    module.weight.grad = None
    module.weight.grad_dtype = torch.float64
    module.weight.grad = torch.ones(4, 5, dtype=torch.float64)


def in_a_graph(module: nn.Linear) -> None:
    module.weight.grad = torch.ones(4, 5, requires_grad=True)


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("see", [hooked, hooked_after, hooked_node, in_float64, in_a_graph])
def test_what_other_code_sees_is_computed_as_torch_does(see: Callable[[nn.Linear], object], in_halves: bool) -> None:
    module, input = LONG.module(torch.float32), LONG.inputs(torch.float32)
    assert isinstance(module, nn.Linear)
    plain = copy.deepcopy(module)
    for each in (plain, module):
        each.weight.grad = torch.ones(4, 5)
    held = [see(each) for each in (plain, module)]
    assert "addmm_" not in run(module, input, in_halves=in_halves)
    backward(plain, input, 0)
    require_same_bits(gradients(module, input), gradients(plain, input))
    del held


def test_torch_autograd_grad_adds_nothing() -> None:
    module, input = nn.Linear(5, 4), normal(3, 5, dtype=torch.float32)
    module.weight.grad = torch.zeros(4, 5)
    defer_weight_gradients(module).fuses = True
    [found] = torch.autograd.grad(module(input).sum(), [module.weight])
    assert found.abs().sum() > 0
    assert not module.weight.grad.any()


def test_under_autocast_products_of_another_dtype_are_added_afterwards() -> None:
    def step(module: nn.Module, input: Tensor, *, in_halves: bool) -> None:
        deferral: Any = defer_weight_gradients(module)
        deferral.fuses = True
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = module(input)
            with collecting(deferral, when=in_halves) as queue:
                output.sum().backward()
            run_products(queue)

    module, input, found = LONG.module(torch.float32), LONG.inputs(torch.float32), []
    for each in (partial(step, in_halves=False), partial(step, in_halves=True)):
        mine = copy.deepcopy(module)
        each(mine, input)
        found.append(
            {name: parameter.grad for name, parameter in mine.named_parameters() if parameter.grad is not None}
        )
    require_same_bits(*found)
