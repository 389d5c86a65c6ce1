"""Lamb is the published update, of whole weights, wherever their parts lie."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import Optimizer

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.optim import Lamb, MasterWeights, Zero
from pipeflow.tensor import ColumnParallelLinear
from pipeflow.testing import run_processes, run_threads
from pipeflow.training.optim import lamb
from tests.checkpoint.checkpoints import Layout, Run, under, wholes
from tests.training import blocks

STEPS = 20
OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
Weights = dict[str, numpy.ndarray]


class Published:
    """The update of one weight, as the paper writes it; `corrected` and `scaled` are its hats and its trust ratio."""

    def __init__(self, weight: Tensor, *, corrected: bool = False, scaled: bool = True) -> None:
        self.weight = weight.detach().clone()
        self.mean, self.square = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.corrected, self.scaled, self.steps = corrected, scaled, 0

    def step(self, gradient: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.steps += 1
        self.mean = betas[0] * self.mean + (1 - betas[0]) * gradient
        self.square = betas[1] * self.square + (1 - betas[1]) * gradient * gradient
        mean, square = self.mean, self.square
        if self.corrected:
            mean, square = mean / (1 - betas[0] ** self.steps), square / (1 - betas[1] ** self.steps)
        change = mean / (square.sqrt() + eps) + weight_decay * self.weight
        norm, length = self.weight.square().sum().sqrt(), change.square().sum().sqrt()
        trust = norm / length if self.scaled and norm > 0 and length > 0 else 1.0
        self.weight = self.weight - lr * trust * change


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(weight: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_the_published_update(corrected: bool, adam: bool) -> None:
    """A matrix, a vector, a weight that starts at zero, and in a group of its own a scalar."""
    weights = [nn.Parameter(w) for w in (drawn(1, 4, 5), drawn(2, 7), torch.zeros(3).double(), drawn(3))]
    first, second = OPTIONS, {**OPTIONS, "lr": 0.5, "betas": (0.5, 0.9), "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [{"params": weights[:3], **first}, {"params": weights[3:], **second}]
    optimizer = Lamb(groups, adam=adam, bias_correction=corrected)
    expected = [Published(weight, corrected=corrected, scaled=not adam) for weight in weights]
    for step in range(STEPS):
        for index, (weight, wanted) in enumerate(zip(weights, expected, strict=True)):
            weight.grad = drawn(100 * step + index, *weight.shape) * 10.0 ** -(step % 4)
            wanted.step(weight.grad, **(second if index == 3 else first))
        optimizer.step()
        for weight, wanted in zip(weights, expected, strict=True):
            near(weight, wanted.weight)


@pytest.mark.parametrize("size", [1e-25, 1e-8, 1.0, 1e8, 1e25])
def test_norms_of_float32_are_right_for_weights_of_any_size(size: float) -> None:
    """Of many numbers, a part of a row, no row at all, and not in one piece."""
    for numbers in (3, 4096, 3 * 4096 + 5, 2**20):
        weights = [torch.full((numbers,), 0.1 * size), drawn(numbers, numbers).float() * size, torch.zeros(numbers)]
        weights.append((drawn(1, numbers, 2).float() * size)[:, 0])
        for weight, norm in zip(weights, lamb._norms(weights), strict=True):
            torch.testing.assert_close(norm, weight.double().square().sum().sqrt(), rtol=3e-6, atol=0)
            [alone] = lamb._norms([weight])
            torch.testing.assert_close(norm, alone, rtol=3e-6, atol=0)


def test_parameters_stepped_in_one_batch_and_alone_end_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in two batches, one of which is a weight larger than any batch."""
    shapes, ends = [(3, 2), (5,), (40,), (2, 2), (1,)], []
    for at_once in (1, 12, 10**6):
        monkeypatch.setattr(lamb, "_AT_ONCE", {"cpu": at_once})
        weights = [nn.Parameter(drawn(index, *shape)) for index, shape in enumerate(shapes)]
        optimizer = Lamb(weights, **OPTIONS, bias_correction=True)
        for step in range(5):
            for index, weight in enumerate(weights):
                weight.grad = None if step == index else drawn(10 * step + index, *weight.shape)
            optimizer.step()
        ends.append(weights)
    assert all(torch.equal(one, other) for one, other in zip(ends[0], ends[2], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(ends[0], ends[1], strict=True))


def test_a_sparse_gradient_is_told_before_any_weight_is_stepped() -> None:
    first, table = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    first.grad = torch.ones(2)
    optimizer = Lamb([first, *table.parameters()])
    with pytest.raises(UsageError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(first, torch.ones(2))
    assert optimizer.state == {}


def test_a_gradient_of_zero_changes_nothing_but_by_decay() -> None:
    weight, frozen, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2)
    optimizer = Lamb([weight, frozen, nn.Parameter(idle)])
    optimizer.step()
    assert optimizer.state == {}
    weight.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2))
    assert list(optimizer.state) == [weight]


def test_complex_weights_count_by_their_magnitude() -> None:
    weight = nn.Parameter(torch.view_as_complex(drawn(1, 3, 2)))
    expected = Published(torch.view_as_real(weight))
    optimizer = Lamb([weight], **OPTIONS)
    for step in range(3):
        weight.grad = torch.view_as_complex(drawn(step, 3, 2))
        expected.step(drawn(step, 3, 2), **OPTIONS)
        optimizer.step()
    near(torch.view_as_real(weight), expected.weight)


def test_another_device_a_tensor_for_a_rate_and_a_closure() -> None:
    """On the meta device every tensor of a step must be there."""
    weight = nn.Parameter(torch.ones(3, 2, device="meta"))
    optimizer = Lamb([weight, nn.Parameter(torch.ones(2, device="meta"))], lr=torch.tensor(0.1))

    def closure() -> float:
        assert torch.is_grad_enabled()
        weight.grad = torch.ones_like(weight)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert optimizer.state[weight]["exp_avg"].device.type == "meta"


def test_a_run_goes_on_from_its_state() -> None:
    weights = [nn.Parameter(drawn(1, 4, 5)), nn.Parameter(drawn(2, 5))]
    optimizer = Lamb(weights, **OPTIONS, bias_correction=True)

    def advance(optimizer: Lamb, weights: Sequence[nn.Parameter], steps: range) -> None:
        for step in steps:
            for index, weight in enumerate(weights):
                weight.grad = drawn(10 * step + index, *weight.shape)
            optimizer.step()

    advance(optimizer, weights, range(5))
    others = [nn.Parameter(weight.detach().clone()) for weight in weights]
    again = Lamb(others)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    advance(optimizer, weights, range(5, 12))
    advance(again, others, range(5, 12))
    assert all(torch.equal(weight, other) for weight, other in zip(weights, others, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"eps": -1e-6}, "eps must be at least 0"),
        ({"weight_decay": math.nan}, "weight_decay must be at least 0, got nan"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"model": nn.Linear(1, 1)}, "parameters that are not in the model"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Lamb([nn.Parameter(torch.ones(1))], **options)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        Lamb(table.parameters()).step()


# Parts of weights on several ranks.


def plain_run(replicas: int) -> Weights:
    """The weights of the whole model after the published updates."""
    model = blocks.whole()
    expected = {name: Published(parameter) for name, parameter in model.named_parameters()}
    for step in range(STEPS):
        inputs, labels = blocks.together(replicas, step)
        loss = functional.mse_loss(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            expected[name].step(gradient, **OPTIONS)
            parameter.data.copy_(expected[name].weight)
    return {name: each.weight.numpy() for name, each in expected.items()}


def bare(pipeline: Pipeline) -> Optimizer:
    return Lamb(pipeline.parameters(), **OPTIONS)


def told(pipeline: Pipeline) -> Optimizer:
    return Lamb(pipeline.parameters(), **OPTIONS, model=pipeline)


def zero(pipeline: Pipeline) -> Optimizer:
    """Made before the wrapper, which tells it."""
    return Zero(pipeline, Lamb(pipeline.parameters(), **OPTIONS))


def masters(pipeline: Pipeline) -> Optimizer:
    return MasterWeights(pipeline, Lamb(pipeline.parameters(), **OPTIONS))


def masters_of_zero(pipeline: Pipeline) -> Optimizer:
    return MasterWeights(pipeline, zero(pipeline))


Make = Callable[[Pipeline], Optimizer]


def train(make: Make) -> Weights:
    """What this rank's weights end as, less what they should."""
    pipeline = blocks.build()
    take_steps(pipeline, make(pipeline))
    names, expected = blocks.names_in_whole(pipeline), plain_run(current_context().data_size)
    return {
        names[name]: (parameter.detach() - blocks.part_of(names[name], torch.from_numpy(expected[names[name]]))).numpy()
        for name, parameter in pipeline.named_parameters()
    }


def take_steps(pipeline: Pipeline, optimizer: Optimizer, dtype: torch.dtype = torch.float64) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        execute_pipeline(blocks.mine(step, dtype), pipeline)
        optimizer.step()


def require_zero(differences: Sequence[Weights]) -> None:
    for of_rank in differences:
        assert of_rank
        for name, difference in of_rank.items():
            assert numpy.abs(difference).max() <= 1e-12, name


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (told, (1, 1, 1)),
        (told, (1, 2, 1)),
        (bare, (1, 2, 1)),
        (told, (2, 2, 1)),
        (told, (1, 4, 2)),
        (zero, (1, 1, 2)),
        (zero, (2, 2, 2)),
        (masters, (1, 2, 1)),
        (masters_of_zero, (1, 2, 2)),
    ],
)
def test_the_norms_are_those_of_whole_weights(make: Make, layout: Layout) -> None:
    require_zero(under(layout, train, make))


def train_one_weight() -> Weights:
    layer = ColumnParallelLinear(4, 4, bias=False, gather_output=True)
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    pipeline = Pipeline(layer, schedule, criterion=lambda output, _: output.square().mean())
    before = layer.weight.detach().clone()
    optimizer = Zero(pipeline, Lamb(pipeline.parameters(), **OPTIONS))
    execute_pipeline(iter([(torch.ones(2, 4), None)]), pipeline)
    optimizer.step()
    return {"weight": layer.weight.detach().numpy(), "before": before.numpy()}


def test_a_replica_may_own_no_weight() -> None:
    results = run_threads(train_one_weight, 4, tensor=2, data=2)
    for owner, other in zip(results[:2], results[2:], strict=True):
        assert (owner["weight"] == other["weight"]).all()
        assert (owner["weight"] != owner["before"]).any()


def train_masters() -> tuple[list[dict[str, Any]], Weights]:
    """Of this rank: the gradients of every step in 16 bits, and what the masters end as."""
    pipeline = blocks.build(torch.bfloat16)
    optimizer = MasterWeights(pipeline, Lamb(pipeline.parameters(), **OPTIONS))
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        execute_pipeline(blocks.mine(step, torch.bfloat16), pipeline)
        gradients.append(
            {name: p.grad.double().numpy() for name, p in pipeline.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    names = {id(parameter): name for name, parameter in pipeline.named_parameters()}
    return gradients, {names[id(p)]: master.detach().double().numpy() for p, master in optimizer.stepped.items()}


def test_masters_are_stepped_by_their_own_whole_norms() -> None:
    """Two tensor ranks' float32 masters are those of the published update of their 16-bit gradients, put together."""
    (gradients, held), (others, also) = run_threads(train_masters, 2, tensor=2)
    dims = {"up": 0, "down": 1}
    for name, start in blocks.whole(torch.bfloat16).named_parameters():
        own, dim = f"chunks.0.{name}", dims.get(name.split(".")[1])

        def whole(first: numpy.ndarray, second: numpy.ndarray, dim: int | None = dim) -> Tensor:
            return torch.from_numpy(first if dim is None else numpy.concatenate([first, second], dim))

        expected = Published(start.double())
        for mine, its in zip(gradients, others, strict=True):
            expected.step(whole(mine[own], its[own]), **OPTIONS)
        torch.testing.assert_close(whole(held[own], also[own]), expected.weight, rtol=0, atol=2e-6)


class Counted:
    """Counts a group's sums."""

    def __init__(self, group: Any) -> None:
        self.sums, self._group = 0, group

    def __getattr__(self, name: str) -> Any:
        self.sums += name == "all_reduce"
        return getattr(self._group, name)


def count_exchanges() -> int:
    pipeline, context = blocks.build(), current_context()
    optimizer = told(pipeline)
    execute_pipeline(blocks.mine(0), pipeline)
    context.tensor = counted = Counted(context.tensor)
    optimizer.step()
    return counted.sums


def test_one_exchange_serves_all_weights() -> None:
    assert run_threads(count_exchanges, 2, tensor=2) == [1, 1]


def step_untold() -> None:
    block = blocks.Block(0, torch.float64).split()  # of no Pipeline
    with pytest.raises(UsageError, match=r"Lamb\(model.parameters\(\), ..., model=model\)"):
        Lamb(block.parameters()).step()
    Lamb(block.parameters(), model=block).step()


def test_tensor_ranks_must_be_told_of() -> None:
    run_threads(step_untold, 2, tensor=2)


def fail_on_one(make: Make) -> int:
    pipeline = blocks.build()
    optimizer = make(pipeline)
    execute_pipeline(blocks.mine(0), pipeline)
    if current_context().rank == 1:
        for parameter in pipeline.parameters():
            parameter.grad = parameter.detach().to_sparse()
        with pytest.raises(UsageError, match="sparse"):
            optimizer.step()
        rank = 1
    else:
        with pytest.raises(PipelineError, match="sparse") as caught:
            optimizer.step()
        rank = caught.value.rank
    optimizer.zero_grad()
    execute_pipeline(blocks.mine(0), pipeline)
    optimizer.step()
    return rank


@pytest.mark.parametrize("make", [told, zero])
def test_a_step_that_fails_on_one_rank_fails_on_all(make: Make) -> None:
    assert run_threads(fail_on_one, 2, make, tensor=2, timeout=60.0) == [1, 1]


def train_sharded() -> Weights:
    """Under fully_shard over the replicas; what is split over tensor ranks, too."""
    context = current_context()
    chunk = nn.Sequential(*(blocks.Block(index, torch.float64).split() for index in range(blocks.BLOCKS)))
    for block in chunk:
        fully_shard(block, mesh=context.mesh["data"])
    optimizer = Lamb(chunk.parameters(), **OPTIONS, model=chunk)
    schedule = make_schedule("1f1b", ranks=1, microbatches=3)
    pipeline = Pipeline(chunk, schedule, criterion=functional.mse_loss)
    take_steps(pipeline, optimizer)
    expected, differences = plain_run(context.data_size), {}
    for name, parameter in chunk.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = blocks.part_of(name, torch.from_numpy(expected[name]))
        differences[name] = (parameter.full_tensor().detach() - whole).numpy()
    return differences


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)])
def test_weights_that_fully_shard_holds_in_parts(layout: Layout) -> None:
    require_zero(under(layout, train_sharded, run=run_processes))


# Checkpoints, of weights that tensor ranks pad with what is no weight.


class LambRun(Run):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizer = Lamb(self.pipeline.parameters(), **OPTIONS, bias_correction=True, model=self.pipeline)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))


def train_and_save(path: Path) -> dict[str, Any]:
    run = LambRun()
    run.train(3)
    run.save(path)
    run.train(4)
    return run.pieces()


def load_and_go_on(path: Path) -> dict[str, Any]:
    run = LambRun()
    run.load(path)
    run.train(4)
    return run.pieces()


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", [(2, 2, 2), (1, 1, 1), (1, 4, 1)])
def test_a_checkpoint_goes_on_under_any_layout(tmp_path: Path, layout: Layout) -> None:
    expected = wholes(under((2, 2, 2), train_and_save, tmp_path / "step-3"))
    found = wholes(under(layout, load_and_go_on, tmp_path / "step-3"))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        numpy.testing.assert_allclose(weight, expected[name], rtol=0, atol=0 if layout == (2, 2, 2) else 1e-12)
