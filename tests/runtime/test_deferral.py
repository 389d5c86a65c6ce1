"""Layers that defer give the gradients that torch's own give, now or later, and hold nothing longer than they must."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeflow import UsageError
from pipeflow.runtime.deferral import Deferral, defer_weight_gradients
from pipeflow.runtime.products import LinearProduct, Product
from pipeflow.testing import run_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Case:
    """A layer, and inputs for it."""

    name: str
    make: Callable[[], nn.Module]
    input: Callable[[], Tensor]

    def __str__(self) -> str:
        return self.name

    def module(self, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make().to(dtype)

    def inputs(self, dtype: torch.dtype) -> Tensor:
        input = self.input()
        return input.to(dtype).requires_grad_() if input.is_floating_point() else input


def linear(name: str, input: Callable[[], Tensor], **options: Any) -> Case:
    return Case(f"linear-{name}", lambda: nn.Linear(5, 4, **options), input)


def conv(dimensions: int, name: str, *shape: int, **options: Any) -> Case:
    layer = nn.Conv1d if dimensions == 1 else nn.Conv2d
    shape = shape or (3, 4, *(9, 8)[:dimensions])
    return Case(f"conv{dimensions}d-{name}", lambda: layer(4, 6, 3, **options), lambda: normal(*shape))


def embedding(name: str, **options: Any) -> Case:
    return Case(
        f"embedding-{name}", lambda: nn.Embedding(7, 5, **options), lambda: torch.tensor([[1, 2, 2], [0, 6, 1]])
    )


CASES = [
    linear("vector", lambda: normal(5)),
    linear("matrix", lambda: normal(3, 5)),
    linear("4d", lambda: normal(2, 3, 2, 5)),
    linear("without-bias", lambda: normal(2, 3, 5), bias=False),
    linear("transposed", lambda: normal(5, 3, 2).transpose(0, 2)),
    linear("of-nothing", lambda: normal(0, 5)),
    *(conv(d, name, **options) for d in (1, 2) for name, options in {
        "plain": {},
        "without-bias": {"bias": False},
        "stride-and-padding": {"stride": 2, "padding": 2},
        "dilated": {"dilation": 2, "groups": 2},
        "same": {"padding": "same"},
        "valid": {"padding": "valid"},
        "circular": {"padding": 1, "padding_mode": "circular"},
        "reflect": {"padding": "same", "padding_mode": "reflect"},
    }.items()),
    conv(1, "batchless", 4, 9, padding=1),
    conv(2, "batchless", 4, 9, 8, padding=(2, 1)),
    Case("conv2d-uneven", lambda: nn.Conv2d(4, 6, (2, 3), padding="same", dilation=(1, 2)), lambda: normal(3, 4, 9, 8)),
    Case("conv2d-last", lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), lambda: normal(3, 4, 9, 8)),
    embedding("plain"),
    embedding("padding", padding_idx=2),
    embedding("negative-padding", padding_idx=-1),
    embedding("by-frequency", scale_grad_by_freq=True),
]  # fmt: skip


@contextmanager
def collecting(deferral: Deferral) -> Iterator[list[Product]]:
    """Makes the backwards inside it the I of the queue that it gives."""
    deferral.queue = queue = []
    yield queue
    deferral.queue = None


def backward(module: nn.Module, input: Tensor, microbatch: int) -> None:
    output = module(input)
    output.backward(normal(*output.shape, seed=1 + microbatch, dtype=output.dtype))


def whole(module: nn.Module, input: Tensor, *, microbatches: int = 3) -> None:
    for microbatch in range(microbatches):
        backward(module, input, microbatch)


def halves(module: nn.Module, input: Tensor, *, microbatches: int = 3) -> None:
    """All the I, then all the W."""
    deferral, queues = defer_weight_gradients(module), []
    for microbatch in range(microbatches):
        with collecting(deferral) as queue:
            backward(module, input, microbatch)
        queues.append(queue)
    for queue in queues:
        assert queue
        run(queue)


def run(queue: list[Product]) -> None:
    for product in queue:
        product()


def gradients(module: nn.Module, input: Tensor) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()} | {"input": input.grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def gradients_of(step: Callable[..., None], module: nn.Module, input: Tensor) -> dict[str, Tensor]:
    module, input = copy.deepcopy(module), input.detach().requires_grad_(input.requires_grad)
    if step is not whole:
        defer_weight_gradients(module)
    (whole if step is at_once else step)(module, input)
    return gradients(module, input)


def at_once(module: nn.Module, input: Tensor) -> None:
    """B, on layers that defer."""
    whole(module, input)


def require_near(here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    assert here.keys() == there.keys()
    for name, gradient in here.items():
        torch.testing.assert_close(gradient, there[name], rtol=1e-12, atol=1e-12)


def require_same_bits(here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    assert here.keys() == there.keys()
    for name, gradient in here.items():
        assert gradient.numpy().tobytes() == there[name].numpy().tobytes(), name


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradients_are_those_of_the_plain_layer(case: Case) -> None:
    module, input = case.module(torch.float64), case.inputs(torch.float64)
    plain, mine = gradients_of(whole, module, input), gradients_of(halves, module, input)
    require_near(mine, plain)
    for name, gradient in mine.items():
        assert gradient.stride() == plain[name].stride(), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_halves_have_the_bits_of_the_whole(case: Case) -> None:
    module, input = case.module(torch.float32), case.inputs(torch.float32)
    require_same_bits(gradients_of(halves, module, input), gradients_of(at_once, module, input))


class Operations(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("case", "work"),
    [(linear("first", lambda: normal(3, 5)), "mm"), (conv(2, "first"), "convolution_backward")],
    ids=["linear", "conv2d"],
)
def test_each_half_does_its_own_work_alone(case: Case, work: str) -> None:
    """One product in I, for an input that wants a gradient, and one in W."""
    module = case.module(torch.float64)
    deferral = defer_weight_gradients(module)
    for wants in (True, False):
        output = module(case.input().requires_grad_(wants))
        with collecting(deferral) as queue, Operations() as first:
            output.sum().backward()
        with Operations() as second:
            run(queue)
        assert first.names.count(work) == wants
        assert second.names.count(work) + second.names.count("addmm_") == 1


class Tied(nn.Module):
    """A language model whose head is its embedding's weight, with a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.twice = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.twice(functional.gelu(self.twice(self.words(words))))))


TIED = Case("tied", Tied, embedding("").input)


def test_a_tied_weight_and_a_layer_used_twice() -> None:
    for dtype, step, other, require in (
        (torch.float64, halves, whole, require_near),
        (torch.float32, halves, at_once, require_same_bits),
    ):
        module, input = TIED.module(dtype), TIED.inputs(dtype)
        require(gradients_of(step, module, input), gradients_of(other, module, input))


def test_what_was_done_is_told() -> None:
    deferral = defer_weight_gradients(Tied())
    assert deferral.deferred == {"words.weight": 35, "twice.weight": 25, "twice.bias": 5}
    assert deferral.remaining == {"norm.weight": 5, "norm.bias": 5}
    told = "65 of 75 elements of weight gradients are deferred, 3 parameters; not: norm.weight, norm.bias"
    assert str(deferral) == told


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def with_own_forward() -> nn.Module:
    layer = nn.Linear(5, 4)
    layer.forward = lambda input: functional.linear(input, layer.weight, layer.bias).tanh()  # type: ignore[method-assign]
    return layer


LEFT = [
    Case("subclass", lambda: Doubled(5, 4), lambda: normal(3, 5)),
    Case("own-forward", with_own_forward, lambda: normal(3, 5)),
    Case("parametrized", lambda: parametrizations.weight_norm(nn.Linear(5, 4)), lambda: normal(3, 5)),
    Case("complex", lambda: nn.Linear(5, 4, dtype=torch.complex128), lambda: normal(3, 5) + 0j),
    embedding("sparse", sparse=True),
    embedding("max-norm", max_norm=1.0),
]


@pytest.mark.parametrize("case", LEFT, ids=str)
def test_what_cannot_defer_is_left_as_it_is(case: Case) -> None:
    module = case.make() if case.name == "complex" else case.make().double()
    deferral = defer_weight_gradients(module)
    assert deferral.deferred == {}
    assert deferral.remaining.keys() == dict(module.named_parameters()).keys()
    with collecting(deferral) as queue:
        module(case.input()).abs().sum().backward()
    assert queue == []
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_frozen_weight_has_no_product_and_a_frozen_bias_no_gradient() -> None:
    for frozen in ("weight", "bias"):
        module = nn.Linear(5, 4)
        module.get_parameter(frozen).requires_grad_(False)
        deferral, input = defer_weight_gradients(module), normal(3, 5, dtype=torch.float32).requires_grad_()
        assert list(deferral.deferred) == (["weight"] if frozen == "bias" else [])
        with collecting(deferral) as queue:
            module(input).sum().backward()
        run(queue)
        assert len(queue) == (frozen == "bias")
        assert gradients(module, input).keys() == {"weight", "bias", "input"} - {frozen}


def test_a_layer_changed_afterwards_is_left_to_torch() -> None:
    module = nn.Linear(5, 4)
    deferral = defer_weight_gradients(module)
    parametrizations.weight_norm(module)
    assert defer_weight_gradients(module).deferred == {}
    with collecting(deferral) as queue:
        module(normal(3, 5, dtype=torch.float32)).sum().backward()
    assert queue == []
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_without_gradients_nothing_is_kept() -> None:
    module = TIED.module(torch.float64)
    defer_weight_gradients(module)
    with torch.no_grad():
        assert not module(TIED.input()).requires_grad


@pytest.mark.parametrize("case", CASES[-5:-3], ids=str)
def test_it_looks_like_the_plain_layer_and_is_copied_as_it(case: Case) -> None:
    plain = case.module(torch.float64)
    module = copy.deepcopy(plain)
    defer_weight_gradients(module)
    assert isinstance(module, type(plain))
    assert repr(module) == repr(plain)
    assert module.state_dict().keys() == plain.state_dict().keys()
    for copied in (
        copy.deepcopy(module),
        copy.copy(module),
        *(pickle.loads(pickle.dumps(module, each)) for each in range(2, 6)),
    ):
        assert type(copied) is type(plain)
        assert "deferral" not in vars(copied)
        input = case.inputs(torch.float64)
        assert torch.equal(copied(input), plain(input))


def test_calling_again_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    deferral = defer_weight_gradients(module)
    assert defer_weight_gradients(module) is deferral
    assert defer_weight_gradients(module[0]) is not deferral


def test_a_layer_of_two_stages_belongs_to_the_last() -> None:
    """Both stages have its whole gradient; the first one's part of it is computed at once."""
    shared = nn.Linear(5, 5)
    stages = [nn.Sequential(nn.Linear(5, 5), shared), nn.Sequential(shared, nn.Linear(5, 5))]
    plain, input = copy.deepcopy(stages), normal(3, 5, dtype=torch.float32)
    deferrals = [defer_weight_gradients(stage) for stage in stages]
    for stage, deferral, products in zip(stages, deferrals, (1, 2), strict=True):
        with collecting(deferral) as queue:
            stage(input).sum().backward()
        assert len(queue) == products
        run(queue)
    for stage in plain:
        stage(input).sum().backward()
    for mine, theirs in zip(stages, plain, strict=True):
        for name, parameter in mine.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad)


def test_hooks_of_a_parameter_run_with_its_product() -> None:
    seen: list[str] = []
    module, input = nn.Linear(5, 4).double(), normal(3, 5)
    plain = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: [seen.append(name), 3 * gradient][1])
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"{name} added"))
    deferral, each = defer_weight_gradients(module), ["weight", "weight added", "bias", "bias added"]
    for microbatch in range(2):
        with collecting(deferral) as queue:
            backward(module, input, microbatch)
        assert seen == []
        run(queue)
        assert seen == each
        seen.clear()
    backward(module, input, 2)
    assert seen == each
    whole(plain, input)
    require_near(gradients(module, input), {name: 3 * each for name, each in gradients(plain, input).items()})


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
    assert queue == []
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_backward_cannot_be_differentiated_again() -> None:
    module = nn.Linear(5, 4)
    defer_weight_gradients(module)
    with pytest.raises(UsageError, match="create_graph=True"):
        module(normal(3, 5, dtype=torch.float32)).sum().backward(create_graph=True)


class Cast(nn.Module):
    """Uses its weight in a layer and by hand."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        output = self.layer(input)
        by_hand = {nn.Linear: functional.linear, nn.Conv2d: functional.conv2d}
        [use] = [use for kind, use in by_hand.items() if isinstance(self.layer, kind)]
        return output + use(input, self.layer.weight)


@pytest.mark.parametrize("case", [CASES[2], CASES[14]], ids=str)
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
        run(queue)
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
        return hidden + self.second(torch.tanh(self.norm(self.first(hidden))))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.run(hidden)
        return checkpoint(self.run, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_runs_twice_and_makes_each_product_once(reentrant: bool) -> None:
    mine = Case("", lambda: Counted(reentrant), lambda: normal(3, 5)).module(torch.float32)
    plain = copy.deepcopy(mine)
    plain.reentrant = None
    deferral, input = defer_weight_gradients(mine), normal(3, 5, dtype=torch.float32)
    inputs = [input.clone().requires_grad_() for _ in range(2)]
    with collecting(deferral) as queue:
        backward(mine, inputs[0], 0)
    assert len(queue) == 2
    run(queue)
    assert mine.forwards == 2
    defer_weight_gradients(plain)
    backward(plain, inputs[1], 0)
    require_same_bits(gradients(mine, inputs[0]), gradients(plain, inputs[1]))


class Scale(torch.autograd.Function):
    """Saves a tensor of its own, and lets others watch it."""

    watched: list[StorageWeakRef]

    @staticmethod
    def forward(ctx: Any, input: Tensor, factor: float, watched: list[StorageWeakRef]) -> Tensor:
        saved = torch.full_like(input, factor)
        watched.append(StorageWeakRef(saved.untyped_storage()))
        ctx.save_for_backward(saved)
        return input * saved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        [saved] = ctx.saved_tensors
        return gradient * saved, None, None


def test_what_only_i_needs_is_freed_by_it_and_the_rest_product_by_product() -> None:
    layers, inputs, saved = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), [], []
    deferral = defer_weight_gradients(layers)
    hidden = torch.ones(3, 5, requires_grad=True)
    for layer in layers:
        hidden = Scale.apply(hidden, 2.0, saved)
        inputs.append(StorageWeakRef(hidden.untyped_storage()))
        hidden = layer(hidden)
    node = hidden.grad_fn.next_functions[1][0]
    with collecting(deferral) as queue:
        hidden.sum().backward()
    del hidden, node
    assert all(each.expired() for each in saved)
    gradient_of = [StorageWeakRef(product.gradient.untyped_storage()) for product in queue]
    for done, product in enumerate(queue):
        assert [each.expired() for each in reversed(inputs)] == [index < done for index in range(3)]
        assert [each.expired() for each in gradient_of] == [index < done for index in range(3)]
        product()
    assert all(each.expired() for each in [*inputs, *gradient_of])


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 12)])
def test_a_gradient_that_is_still_needed_is_nobody_elses_to_add_to(shape: tuple[int, ...]) -> None:
    """A parameter added to the output is given the very tensor that is the output's gradient, and adds to it later."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(shape[-1], shape[-1]), nn.Parameter(torch.zeros(4, 6))

        def forward(self, input: Tensor) -> Tensor:
            return self.layer(input).view(4, 6) + self.shift

    module = Case("", Shifted, lambda: normal(*shape)).module(torch.float64)
    input = normal(*shape)
    require_near(gradients_of(halves, module, input), gradients_of(whole, module, input))


def test_an_input_overwritten_before_w_is_noticed() -> None:
    module, input = nn.Linear(5, 4), torch.ones(3, 5)
    with collecting(defer_weight_gradients(module)) as queue:
        module(input).sum().backward()
    input.add_(1)
    with pytest.raises(UsageError, match=r"\(4, 5\) was modified in place"):
        run(queue)


def test_the_backward_may_run_on_another_thread() -> None:
    module, input = TIED.module(torch.float64), TIED.input()
    mine = copy.deepcopy(module)
    deferral = defer_weight_gradients(mine)
    output = mine(input).sum()
    with collecting(deferral) as queue:
        thread = Thread(target=output.backward)
        thread.start()
        thread.join()
    run(queue)
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
        output.register_hook(lambda gradient: take(LinearProduct(self.scale, None, input, gradient)))
        return output.clone()


def test_a_layer_of_ones_own_takes_part_by_the_protocol() -> None:
    module = Own()
    deferral = defer_weight_gradients(module)
    assert deferral.deferred == {"scale": 20}
    with collecting(deferral) as queue:
        module(torch.ones(3, 5)).sum().backward()
    assert module.scale.grad is None
    run(queue)
    assert torch.equal(module.scale.grad, torch.full((4, 5), 3.0))


def test_transforms_and_the_compiler_see_the_plain_layer() -> None:
    module, input = nn.Linear(5, 4), normal(3, 5, dtype=torch.float32)
    plain, weights = copy.deepcopy(module), dict(module.named_parameters())
    deferral = defer_weight_gradients(module)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, weights, input).square().sum()

    detached = {name: weight.detach() for name, weight in weights.items()}
    by_transform = torch.func.grad(loss)(detached)
    plain(input).square().sum().backward()
    torch.testing.assert_close(by_transform["weight"], plain.weight.grad)
    with collecting(deferral) as queue:
        torch.compile(module, backend="eager", fullgraph=True)(input).square().sum().backward()
    assert queue == []
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)
