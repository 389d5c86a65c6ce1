"""Deferring layers amid the rest of autograd: hooks, casts, checkpoints, threads, transforms; and what they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeflow import UsageError
from pipeflow.engine.deferral.module import Deferral, defer_weight_gradients
from pipeflow.engine.deferral.products import Gradients, of_linear, product_of, run_products
from pipeflow.tensor import ColumnParallelLinear
from pipeflow.testing import run_threads
from tests.deferral.halves import (
    CASES,
    TIED,
    Case,
    backward,
    collecting,
    gradients,
    gradients_of,
    halves,
    held_by,
    normal,
    products_of,
    require_near,
    require_same_bits,
    whole,
)


def note_and_triple(seen: list[str], name: str, gradient: Tensor) -> Tensor:
    seen.append(name)
    return 3 * gradient


def test_a_layer_whose_parameters_have_hooks_does_not_defer() -> None:
    seen: list[str] = []
    module, input = nn.Linear(5, 4).double(), normal(3, 5)
    plain = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        parameter.register_hook(partial(note_and_triple, seen, name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"{name} added"))
    deferral, each = defer_weight_gradients(module), ["weight", "weight added", "bias", "bias added"]
    for microbatch in range(2):
        with collecting(deferral) as queue:
            backward(module, input, microbatch)
        assert not queue
        assert sorted(seen) == sorted(each)
        seen.clear()
    backward(module, input, 2)
    assert sorted(seen) == sorted(each)
    whole(plain, input)
    require_near(gradients(module, input), {name: 3 * each for name, each in gradients(plain, input).items()})


class Twice(nn.Module):
    """A layer that is called twice, and words that are also the head."""

    def __init__(self, make: Callable[..., nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.words, self.twice, self.head = nn.Embedding(7, 5), make(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.twice(self.twice(self.words(words)).tanh()))
        return hidden


@pytest.mark.parametrize("make", [nn.Linear, ColumnParallelLinear], ids=["stock", "tensor-parallel"])
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
@pytest.mark.parametrize("step", [whole, partial(halves, defers=False)], ids=["whole", "halves"])
def test_a_hook_sees_the_whole_gradient_of_a_backward(
    make: Callable[..., nn.Linear], checkpointed: bool | None, step: Callable[..., None]
) -> None:
    """As often as torch calls it, and in either kind of hook."""

    def train(module: nn.Module, step: Callable[..., None]) -> tuple[dict[str, Tensor], list[str]]:
        seen: list[str] = []
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1).square())
        if checkpointed is not None:
            layer = module.get_submodule("twice")
            forward = partial(checkpoint, layer.forward, use_reentrant=checkpointed)
            layer.forward = forward
        step(module, words)
        return gradients(module, words), sorted(seen)

    words = TIED.input()
    module = Case("", partial(Twice, make), lambda: words).module(torch.float64)
    plain = train(copy.deepcopy(module), whole)
    defer_weight_gradients(module)
    found = train(module, step)
    require_near(found[0], plain[0])
    assert found[1] == plain[1]


def test_a_failed_backward_leaves_nothing_to_the_next() -> None:
    module, input = nn.Linear(5, 5).double(), normal(3, 5).requires_grad_()
    defer_weight_gradients(module)
    module.weight.register_hook(lambda gradient: 2 * gradient)
    handle = input.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        module(input).sum().backward()
    module.weight.grad = None  # torch says nothing of it
    handle.remove()
    module(input).sum().backward()
    torch.testing.assert_close(module.weight.grad, 2 * input.detach().sum(0).expand(5, 5))


def test_a_hook_on_a_weight_that_other_code_uses_too_sees_the_whole_gradient() -> None:
    module, input, found = nn.Linear(5, 5), normal(3, 5, dtype=torch.float32), []
    plain, deferral = copy.deepcopy(module), defer_weight_gradients(module)
    for layer in (plain, module):
        layer.weight.register_hook(torch.square)
        with collecting(deferral):
            functional.linear(layer(input), layer.weight).sum().backward()
        found.append(gradients(layer, input))
    require_same_bits(found[1], found[0])


def test_a_gradient_of_another_dtype_is_added_to() -> None:
    module = nn.Linear(5, 4).to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    halves(module, normal(3, 5, dtype=torch.bfloat16), microbatches=1)
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    assert not torch.equal(module.weight.grad, torch.ones(4, 5))


def test_torch_autograd_grad_leaves_parameters_alone() -> None:
    module, input = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4)), normal(3, 5, dtype=torch.float32).requires_grad_()
    plain = copy.deepcopy(module)
    deferral = defer_weight_gradients(module)
    with collecting(deferral) as queue:
        [mine] = torch.autograd.grad(module(input).sum(), input)
        module(input).sum().backward(inputs=[input])
    [theirs] = torch.autograd.grad(plain(input).sum(), input)
    torch.testing.assert_close(mine, theirs)
    assert not queue
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_backward_cannot_be_differentiated_again() -> None:
    module = nn.Linear(5, 4)
    defer_weight_gradients(module)
    with pytest.raises(UsageError, match="create_graph=True"):
        module(normal(3, 5, dtype=torch.float32)).sum().backward(create_graph=True)


@pytest.mark.parametrize("in_halves", [False, True])
def test_torch_autograd_grad_finds_the_gradients_of_weights(in_halves: bool) -> None:
    """As a criterion asks for the last layer's, to weigh two losses; the backward after it defers as ever."""
    module, input, found = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4)), normal(3, 5, dtype=torch.float32), []
    plain = copy.deepcopy(module)
    deferral = defer_weight_gradients(module)
    for each in (plain, module):
        parameters = list(each.parameters())
        with collecting(deferral, when=in_halves) as queue:
            loss = each(input).square().sum()
            asked = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
            loss.backward(inputs=parameters[:1], retain_graph=True)
            assert not queue
            loss.backward()
        assert len(products_of(queue)) == 2 * (in_halves and each is module)
        run_products(queue)
        found.append(gradients(each, input) | {f"asked {index}": each for index, each in enumerate(asked)})
    require_same_bits(found[1], found[0])


@pytest.mark.parametrize("in_halves", [False, True])
def test_hooks_on_the_nodes_of_parameters_run_as_in_torch(in_halves: bool) -> None:
    """Those that accumulate gradients, as DistributedDataParallel and Megatron's optimizers have; and torch's hooks on
    several gradients.
    """
    module, input, seen = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), normal(3, 5, dtype=torch.float32), []
    plain, found = copy.deepcopy(module), []
    deferral = defer_weight_gradients(module)
    for each in (plain, module):
        seen.append(calls := dict[str, Any]())
        nodes = [get_gradient_edge(each.get_parameter(name)).node for name in ("0.weight", "1.bias")]
        nodes[0].register_prehook(lambda gradients: (3 * gradients[0],))
        nodes[1].register_hook(lambda _, gradients, calls=calls: calls.update(node=gradients[0].clone()))
        register_multi_grad_hook(
            list(each[1].parameters()),
            lambda gradients, calls=calls: calls.update(several=[gradient.clone() for gradient in gradients]),
        )
        with collecting(deferral, when=in_halves) as queue:
            each(input).square().sum().backward()
        assert not queue
        found.append(gradients(each, input))
    require_same_bits(found[1], found[0])
    assert len(seen[0]) == 2
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)


def test_without_halves_layers_are_the_plain_ones() -> None:
    """So a backward can be differentiated again."""
    module, input = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4)), normal(3, 5, dtype=torch.float32)
    plain, found = copy.deepcopy(module), []
    defer_weight_gradients(module).active = False
    for each in (plain, module):
        leaf = input.clone().requires_grad_()
        [slope] = torch.autograd.grad(each(leaf).square().sum(), leaf, create_graph=True)
        slope.square().sum().backward()
        found.append(gradients(each, leaf))
    require_same_bits(found[1], found[0])


class Cast(nn.Module):
    """Uses its weight in a layer and by hand."""

    layer: Any

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.layer(input)
        by_hand: dict[type[nn.Module], Any] = {nn.Linear: functional.linear, nn.Conv2d: functional.conv2d}
        [use] = [use for kind, use in by_hand.items() if isinstance(self.layer, kind)]
        by_use: Tensor = use(input, self.layer.weight)
        return output + by_use


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("linear-4d", "conv2d-plain")], ids=str)
def test_under_autocast_the_same_dtypes_flow(case: Case) -> None:
    plain = Cast(case.module(torch.float32))
    mine, found = copy.deepcopy(plain), []
    deferral = defer_weight_gradients(mine)
    for module in (plain, mine):
        input = case.inputs(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            output = module(input)
        with collecting(deferral) as queue:
            output.backward(normal(*output.shape, dtype=output.dtype))
        run_products(queue)
        found.append(gradients(module, input) | {"output": output.detach()})
    for name, theirs in found[0].items():
        assert found[1][name].dtype == theirs.dtype
        torch.testing.assert_close(found[1][name], theirs, rtol=1e-2, atol=1e-2)


class Counted(nn.Module):
    """A block that counts its forwards; checkpointed, with or without reentrance, or not at all (None)."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.reentrant = reentrant
        self.forwards = 0

    def run(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        output: Tensor = hidden + self.second(torch.tanh(self.norm(self.first(hidden))))
        return output

    def forward(self, hidden: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.run(hidden)
        output: Tensor = checkpoint(self.run, hidden, use_reentrant=self.reentrant)
        return output


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_runs_twice_and_makes_each_product_once(reentrant: bool) -> None:
    mine = Case("", lambda: Counted(reentrant), lambda: normal(3, 5)).module(torch.float32)
    assert isinstance(mine, Counted)
    plain = copy.deepcopy(mine)
    plain.reentrant = None
    deferral, input = defer_weight_gradients(mine), normal(3, 5, dtype=torch.float32)
    inputs = [input.clone().requires_grad_() for _ in range(2)]
    with collecting(deferral) as queue:
        backward(mine, inputs[0], 0)
    assert len(products_of(queue)) == 2
    run_products(queue)
    assert mine.forwards == 2
    defer_weight_gradients(plain)
    backward(plain, inputs[1], 0)
    require_same_bits(gradients(mine, inputs[0]), gradients(plain, inputs[1]))


class Scale(torch.autograd.Function):
    """Saves a tensor of its own, and lets others watch it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, factor: float, watched: list[StorageWeakRef]) -> Tensor:
        saved = torch.full_like(input, factor)
        watched.append(StorageWeakRef(saved.untyped_storage()))
        ctx.save_for_backward(saved)
        return input * saved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [saved] = ctx.saved_tensors
        return gradient * saved, None, None


def test_what_only_i_needs_is_freed_by_it_and_the_rest_product_by_product() -> None:
    layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
    inputs: list[StorageWeakRef] = []
    saved: list[StorageWeakRef] = []
    deferral = defer_weight_gradients(layers)
    hidden = torch.ones(3, 5, requires_grad=True)
    for layer in layers:
        hidden = Scale.apply(hidden, 2.0, saved)  # type: ignore[no-untyped-call]  # as torch has it
        inputs.append(StorageWeakRef(hidden.untyped_storage()))
        hidden = layer(hidden)
    with collecting(deferral) as queue:
        hidden.sum().backward()
    del hidden
    assert all(each.expired() for each in saved)
    products = products_of(queue)
    gradient_of = [StorageWeakRef(held_by(product)[1].untyped_storage()) for product in products]
    assert len(products) == 3
    freed: list[tuple[list[bool], list[bool]]] = []

    def watch(make: Callable[[], Gradients]) -> Gradients:
        freed.append(([each.expired() for each in reversed(inputs)], [each.expired() for each in gradient_of]))
        return make()

    [backward] = queue
    queue[backward] = [(parameters, partial(watch, make)) for parameters, make in products]
    del products
    run_products(queue)
    assert freed == [([index < done for index in range(3)],) * 2 for done in range(3)]
    assert all(each.expired() for each in [*inputs, *gradient_of])


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 12)])
def test_a_gradient_that_is_still_needed_is_nobody_elses_to_add_to(shape: tuple[int, ...]) -> None:
    """A parameter added to the output is given the very tensor that is the output's gradient, and adds to it later."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(shape[-1], shape[-1]), nn.Parameter(torch.zeros(4, 6))

        def forward(self, input: Tensor) -> Tensor:
            output: Tensor = self.layer(input)
            return output.view(4, 6) + self.shift

    module = Case("", Shifted, lambda: normal(*shape)).module(torch.float64)
    input = normal(*shape)
    require_near(gradients_of(halves, module, input), gradients_of(whole, module, input))


def test_an_input_overwritten_before_w_is_noticed() -> None:
    module, input = nn.Linear(5, 4), torch.ones(3, 5)
    with collecting(defer_weight_gradients(module)) as queue:
        module(input).sum().backward()
    input.add_(1)
    with pytest.raises(UsageError, match=r"\(4, 5\) was modified in place"):
        run_products(queue)


def test_the_backward_may_run_on_another_thread() -> None:
    module, input = TIED.module(torch.float64), TIED.input()
    mine = copy.deepcopy(module)
    deferral = defer_weight_gradients(mine)
    output = mine(input).sum()
    with collecting(deferral) as queue:
        thread = Thread(target=output.backward)
        thread.start()
        thread.join()
    run_products(queue)
    module(input).sum().backward()
    require_near(gradients(mine, input), gradients(module, input))


def run_stage(microbatches: int) -> dict[str, Tensor]:
    module = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4)))
    for index, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, seed=index)
    input = normal(5, 8).requires_grad_()
    halves(module, input, microbatches=microbatches)
    whole(module, input, microbatches=microbatches)
    return {name: gradient / microbatches for name, gradient in gradients(module, input).items()}


def test_ranks_that_are_threads_do_not_disturb_each_other() -> None:
    results = run_threads(run_stage, 3, 20)
    for result in results[1:]:
        require_same_bits(result, results[0])


class Own(nn.Module):
    """A layer that is Deferrable by itself: a hook on its output hands over the product."""

    deferral: Deferral | None = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 5))

    def deferred_parameters(self) -> list[nn.Parameter]:
        return [self.scale]

    def forward(self, input: Tensor) -> Tensor:
        output = functional.linear(input, self.scale.detach()).requires_grad_()
        assert self.deferral is not None
        take = self.deferral.take
        output.register_hook(lambda gradient: take(product_of(of_linear, self.scale, None, input, gradient)))
        return output.clone()


def test_a_layer_of_ones_own_takes_part_by_the_protocol() -> None:
    module = Own()
    deferral = defer_weight_gradients(module)
    assert deferral.deferred == {"scale": 20}
    with collecting(deferral) as queue:
        module(torch.ones(3, 5)).sum().backward()
    assert gradients(module, torch.ones(())) == {}
    run_products(queue)
    assert torch.equal(gradients(module, torch.ones(()))["scale"], torch.full((4, 5), 3.0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_transforms_and_the_compiler_see_the_plain_layer() -> None:
    module, input = nn.Linear(5, 4), normal(3, 5, dtype=torch.float32)
    plain, weights = copy.deepcopy(module), dict(module.named_parameters())
    deferral = defer_weight_gradients(module)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(module, weights, input)
        return output.square().sum()

    detached = {name: weight.detach() for name, weight in weights.items()}
    by_transform = torch.func.grad(loss)(detached)
    plain(input).square().sum().backward()
    torch.testing.assert_close(by_transform["weight"], plain.weight.grad)
    with collecting(deferral) as queue:
        torch.compile(module, backend="eager", fullgraph=True)(input).square().sum().backward()
        torch.jit.trace(module, input)(input).square().sum().backward()
    assert not queue
    assert plain.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, 2 * plain.weight.grad)
