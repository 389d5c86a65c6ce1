"""A whole model beside its stock twin: over threads and gloo, with a split sequence, in halves, checkpointed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeflow.engine.deferral.module import Deferrable, Deferral, defer_weight_gradients
from pipeflow.engine.deferral.products import Queue, run_products
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import Divided, partial_in, splits_of
from pipeflow.engine.parallel.transport.protocol import Alone
from pipeflow.engine.tensor.layer import cut
from pipeflow.tensor import ColumnParallelLinear, vocab_parallel_cross_entropy
from pipeflow.testing import run_processes, run_threads
from tests.deferral.halves import require_same_bits
from tests.tensor.gpt import VOCABULARY, Model, batch, parallel, parallel_block, stock, stock_block
from tests.tensor.ranks import SIZES, Counting, backward, mine, normal, on_ranks, require_near, seeded

SEQUENCES = pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])


def loss_of(model: Model, seed: int = 0) -> Tensor:
    """Of the split logits of a parallel model."""
    tokens, labels = batch(seed)
    return vocab_parallel_cross_entropy(model(tokens), labels, vocab_size=VOCABULARY, label_smoothing=0.1)


@dataclass(frozen=True)
class Trained:
    """What the stock model finds."""

    model: Model
    loss: float
    gradients: dict[str, Tensor]


def trained() -> Trained:
    model, (tokens, labels) = seeded(stock), batch()
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    loss.backward()
    return Trained(model, float(loss.detach()), gradients(model))


def require_parts(model: Model, wholes: dict[str, Tensor], tolerance: float) -> None:
    """The gradients are this rank's parts of the stock model's, once partial ones were summed."""
    group, splits = current_context().tensor, splits_of(model)
    for parameter in partial_in(model):
        assert parameter.grad is not None
        group.all_reduce(parameter.grad).wait()
    for name, parameter in model.named_parameters():
        expected = cut(wholes[name], splits.get(id(parameter)), group).to(parameter.dtype)
        require_near(parameter.grad, expected, tolerance)


def train_beside(native: Trained, sequence: bool) -> None:
    model = parallel(native.model, sequence=sequence)
    assert all(isinstance(layer, Divided) for layer in (model.words, model.head, model.norm, model.block.up))
    loss = loss_of(model)
    loss.backward()
    assert abs(float(loss.detach()) - native.loss) < 1e-12
    require_parts(model, native.gradients, 1e-12)
    lower = copy.deepcopy(model).bfloat16()
    loss_of(lower).backward()
    require_parts(lower, native.gradients, 0.1)


@SEQUENCES
@pytest.mark.parametrize("size", SIZES)
def test_over_threads(size: int, sequence: bool) -> None:
    run_threads(train_beside, size, trained(), sequence, tensor=size)


def over_gloo(native: Trained) -> None:
    for sequence in (False, True):
        train_beside(native, sequence)


@pytest.mark.slow
def test_over_gloo() -> None:
    run_processes(over_gloo, 2, trained(), tensor=2)


def whole(model: Model, deferral: Deferral | None) -> None:
    for seed in range(3):
        loss_of(model, seed).backward()


def halves(model: Model, deferral: Deferral | None) -> None:
    """All the I, then all the W."""
    assert deferral is not None
    queues = []
    for seed in range(3):
        queue: Queue = {}
        deferral.queue = queue
        loss_of(model, seed).backward()
        deferral.queue = None
        queues.append(queue)
    for queue in queues:
        [products] = queue.values()
        assert len(products) == 6
        run_products(queue)


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@SEQUENCES
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("fuses", [False, True], ids=["", "fused"])
def test_the_halves_of_a_backward_have_the_bits_of_the_whole(
    size: int, sequence: bool, dtype: torch.dtype, fuses: bool
) -> None:
    native = seeded(stock).to(dtype)

    def rank() -> None:
        plain, model = parallel(native, sequence=sequence), parallel(native, sequence=sequence)
        deferral = defer_weight_gradients(model)
        deferral.fuses = fuses
        norms = {name for name, _ in model.named_parameters() if "norm" in name}
        assert set(deferral.remaining) == norms
        whole(plain, None)
        whole(model, deferral)
        at_once = gradients(model)
        for name, gradient in gradients(plain).items():
            require_near(at_once[name], gradient, 1e-12 if dtype is torch.float64 else 1e-5)
        model.zero_grad()
        halves(model, deferral)
        require_same_bits(gradients(model), at_once)

    on_ranks(size, rank)


def note(calls: list[str], name: str, _: Tensor) -> None:
    calls.append(name)


@SEQUENCES
@pytest.mark.parametrize("deferring", [False, True], ids=["plain", "deferring"])
def test_checkpoints_hooks_and_autograd_grad(sequence: bool, deferring: bool) -> None:
    native = seeded(stock)

    def rank() -> None:
        found = []
        for checkpointed in (False, True):
            model = parallel(native, sequence=sequence)
            deferral = defer_weight_gradients(model) if deferring else None
            calls: list[str] = []
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(partial(note, calls, name))
            if checkpointed:
                model.block.forward = partial(checkpoint, model.block.forward, use_reentrant=False)  # type: ignore[method-assign]
            whole(model, deferral)
            assert set(calls) == {name for name, _ in model.named_parameters()}
            found.append(gradients(model))
        require_same_bits(*found)

    on_ranks(2, rank)


def test_the_gradient_of_an_input_alone_leaves_parameters_alone() -> None:
    def rank() -> None:
        layer = ColumnParallelLinear(8, 8)
        defer_weight_gradients(layer)
        input = torch.ones(3, 8, requires_grad=True)
        torch.autograd.grad(layer(input).sum(), input)
        assert layer.weight.grad is None

    on_ranks(2, rank)


PER_BLOCK = {False: {"all_reduce": 2}, True: {"all_gather": 2, "reduce_scatter": 2}}


@SEQUENCES
@pytest.mark.parametrize("deferring", [False, True], ids=["plain", "deferring"])
def test_the_collectives_of_a_block(sequence: bool, deferring: bool) -> None:
    native = seeded(stock_block)

    def rank() -> None:
        group = Counting(current_context().tensor)
        block = parallel_block(native, sequence=sequence, group=group)
        if deferring:
            defer_weight_gradients(block)
        input = normal(2, 8, 16, dtype=torch.float32).requires_grad_()
        output = block(mine(input, 1) if sequence else input)
        assert group.taken() == PER_BLOCK[sequence]
        output.sum().backward()
        assert group.taken() == PER_BLOCK[sequence]

    on_ranks(2, rank)


class _Forbidding(Alone):
    def __getattribute__(self, name: str) -> Any:
        if name in ("all_reduce", "all_gather", "reduce_scatter", "all_reduce_max", "broadcast"):
            raise AssertionError(name)
        return super().__getattribute__(name)


@SEQUENCES
@pytest.mark.parametrize("deferring", [False, True], ids=["plain", "deferring"])
def test_a_group_of_one_exchanges_nothing(sequence: bool, deferring: bool) -> None:
    native, group = seeded(stock_block), _Forbidding()
    block = parallel_block(native, sequence=sequence, group=group)
    if deferring:
        defer_weight_gradients(block)
    input = normal(2, 8, 16, dtype=torch.float32)
    for here, there in zip(backward(block, input), backward(native, input), strict=True):
        assert here is not None
        assert there is not None
        assert torch.equal(here, there)


class ProductsSeen(TorchDispatchMode):
    """Notes matrix products among the group's events."""

    def __init__(self, group: Counting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.group.events.append("product")
        return func(*args, **(kwargs or {}))


@SEQUENCES
@pytest.mark.parametrize("deferring", [False, True], ids=["plain", "deferring"])
def test_the_weights_product_runs_while_the_inputs_gradient_is_summed(sequence: bool, deferring: bool) -> None:
    def rank() -> None:
        group = Counting(current_context().tensor)
        layer = ColumnParallelLinear(8, 8, sequence_parallel=sequence, group=group)
        if deferring:
            defer_weight_gradients(layer)
        output = layer(torch.ones(2, 4, 8, requires_grad=True))
        group.events.clear()
        with ProductsSeen(group):
            output.sum().backward()
        name = "reduce_scatter" if sequence else "all_reduce"
        assert group.events == ["product", f"{name} starts", "product", f"{name} is waited for"]

    on_ranks(2, rank)


def test_a_copy_is_in_the_same_group_and_defers_nothing() -> None:
    def rank() -> None:
        layer = ColumnParallelLinear(8, 12)
        assert isinstance(layer, Deferrable)
        defer_weight_gradients(layer)
        other = copy.deepcopy(layer)
        assert other.group is layer.group
        assert other.deferral is None
        assert other.splits() == layer.splits()
        assert torch.equal(other.weight, layer.weight)
        assert other.weight is not layer.weight
        assert repr(other) == repr(layer)

    on_ranks(2, rank)
