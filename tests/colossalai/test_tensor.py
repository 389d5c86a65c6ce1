"""Parameters that a program splits one by one: whatever computes with them gives what the whole gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.colossalai.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from pipeflow.colossalai.utils.model.colo_init_context import ColoInitContext
from pipeflow.core.errors import UsageError
from pipeflow.testing import run_threads

TP1D = ComputeSpec(ComputePattern.TP1D)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Conv1D(nn.Module):
    """A linear layer as GPT-2 of transformers has it: the weight is (in, out), and the output is reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(values(8, 12, seed=1)), nn.Parameter(values(12, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.shape[:-1], 12))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(values(12, 8, seed=1)), nn.Parameter(values(12, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, padding: int | None = 3) -> None:
        super().__init__()
        self.weight, self.padding = nn.Parameter(values(12, 8, seed=1)), padding

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding((x[..., 0] * 100).long() % 12, self.weight, self.padding) * x


class Norm(nn.Module):
    """Not known to be computed part by part, so with the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(8, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (8,), self.weight) @ torch.outer(self.weight, self.weight)


class Gated(nn.Module):
    """A split output, pointwise functions of it, and a product that takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(*sizes, dtype=torch.float64) for sizes in ((8, 12), (8, 12), (12, 8))
        )
        for index, parameter in enumerate(self.parameters()):
            parameter.data = values(*parameter.shape, seed=index)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.gate(x)) * self.up(x) * 0.5 + 1
        output: Tensor = self.down(hidden.view(*x.shape[:-1], 12)) + hidden.sum() + hidden.softmax(-1).std()
        return output


def outcome(module: nn.Module) -> list[Tensor]:
    """The output and all gradients, whole."""
    x = values(2, 3, 8, seed=5).requires_grad_()
    output = module(x)
    output.pow(2).sum().backward()
    with torch.no_grad():
        again = module(x)
    found = [output.detach(), again, x.grad]
    for parameter in module.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        if isinstance(parameter, ColoTensor):
            gradient = ColoTensor.from_torch_tensor(gradient, parameter.spec).to_replicate()
        found.append(gradient)
    return found


def split(make: Callable[[], nn.Module], dims: dict[str, int], keeps: tuple[str, ...], degree: int) -> list[Tensor]:
    with ColoInitContext():
        module = make()
    group = ProcessGroup(tp_degree=degree)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, ColoParameter)
        parameter.set_process_group(group)
        if name in dims:
            parameter.set_tensor_spec(ShardSpec([dims[name]], [degree]), ComputeSpec(ComputePattern.TP1D))
            assert parameter.compute_spec is not None
            parameter.compute_spec.set_output_replicate(name not in keeps)
            assert parameter.numel() * degree == parameter.size_global().numel()
    return outcome(module)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, int], tuple[str, ...]]] = {
    "Conv1D, outputs": (Conv1D, {"weight": -1, "bias": -1}, ()),
    "Conv1D, outputs, whole bias": (Conv1D, {"weight": 1}, ()),
    "Conv1D, inputs": (Conv1D, {"weight": 0}, ()),
    "Conv1D, inputs, split bias": (Conv1D, {"weight": 0, "bias": 0}, ()),
    "Linear, outputs": (Linear, {"weight": 0, "bias": 0}, ()),
    "Linear, inputs": (Linear, {"weight": -1}, ()),
    "Linear, bias alone": (Linear, {"bias": 0}, ()),
    "Embedding, entries": (Embedding, {"weight": 0}, ()),
    "Embedding, hidden": (Embedding, {"weight": -1}, ()),
    "another function": (Norm, {"weight": 0}, ()),
    "kept outputs": (
        Gated,
        {"up.weight": 0, "up.bias": 0, "gate.weight": 0, "gate.bias": 0, "down.weight": 1},
        ("up.weight", "gate.weight"),
    ),
    "one kept output of two": (Gated, {"up.weight": 0, "gate.weight": 0, "down.weight": 0}, ("up.weight",)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_what_is_computed_with_parts_is_what_the_whole_gives(case: str, degree: int) -> None:
    make, dims, keeps = CASES[case]
    want = outcome(make())
    for found in run_threads(split, 4, make, dims, keeps, degree, data=4):
        for part, whole in zip(found, want, strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-11, atol=1e-11)


def test_a_kept_output_is_a_part() -> None:
    def look() -> tuple[int, ...]:
        with ColoInitContext():
            layer = nn.Linear(4, 6)
        weight = layer.weight
        assert isinstance(weight, ColoParameter)
        weight.set_process_group(ProcessGroup(tp_degree=2))
        weight.set_tensor_spec(ShardSpec([0], [2]), ComputeSpec(ComputePattern.TP1D))
        assert weight.compute_spec is not None
        weight.compute_spec.set_output_replicate(False)
        return tuple(layer(torch.ones(3, 4)).tanh().shape)

    assert run_threads(look, 2, data=2) == [(3, 3)] * 2


def test_all_ranks_have_the_values_of_the_first() -> None:
    def sum_of_all() -> float:
        group = ProcessGroup(tp_degree=2)
        parameter = ColoParameter(torch.full((4,), float(group.context.rank)))
        parameter.set_process_group(group)
        return float(parameter.detach().sum())

    assert run_threads(sum_of_all, 4, data=4) == [0.0] * 4


def test_a_tensor_is_made_whole_again_and_copied() -> None:
    def turn() -> None:
        group = ProcessGroup(tp_degree=2)
        whole = values(4, 6)
        parameter = ColoParameter(whole.clone(), spec=ColoTensorSpec(group))
        parameter.set_tensor_spec(ShardSpec([1], [2]), TP1D)
        copied = copy.deepcopy(parameter)
        assert copied.spec == parameter.spec
        assert copied.shape == (4, 3)
        assert torch.equal(parameter.to_replicate(), whole)
        parameter.set_tensor_spec(ShardSpec([0], [2]), TP1D)
        assert parameter.shape == (2, 6)
        assert torch.equal(parameter.to_replicate(), whole)
        parameter.set_tensor_spec(ReplicaSpec(), None)
        assert torch.equal(parameter, whole)
        assert torch.equal(copied.to_replicate(), whole)

    run_threads(turn, 2, data=2)


def test_a_module_that_is_moved_keeps_its_parts() -> None:
    def move() -> None:
        with ColoInitContext():
            layer = nn.Linear(4, 6)
        weight = layer.weight
        assert isinstance(weight, ColoParameter)
        weight.set_process_group(ProcessGroup(tp_degree=2))
        weight.set_tensor_spec(ShardSpec([0], [2]), TP1D)
        layer.double().to("cpu")
        assert layer.weight is weight
        assert (weight.shape, weight.dtype) == ((3, 4), torch.float64)

    run_threads(move, 2, data=2)


def test_the_grid_of_ranks() -> None:
    def place() -> tuple[Any, ...]:
        group = ProcessGroup(tp_degree=4)
        assert group == ProcessGroup(dp_degree=2) != ProcessGroup()
        return group.tp_rank_list(), group.dp_rank_list(), group.tp_local_rank(), group.dp_local_rank()

    found = run_threads(place, 8, data=8, deadline=120)
    assert found[0] == ([0, 1, 2, 3], [0, 4], 0, 0)
    assert found[5] == ([4, 5, 6, 7], [1, 5], 1, 1)


def test_the_context_makes_one_of_what_is_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            shared = nn.Parameter(torch.ones(2))
            self.third, self.fourth = shared, shared
            self.register_parameter("none", None)

    def make() -> None:
        with ColoInitContext(dtype=torch.float16):
            module = Tied()
        assert module.second.weight is module.first.weight
        assert module.third is module.fourth
        assert all(type(each) is ColoParameter and each.dtype == torch.float16 for each in module.parameters())
        assert type(nn.Linear(2, 2).weight) is nn.Parameter

    run_threads(make, 1)


def wrong_parts() -> None:
    ColoParameter(torch.ones(4)).set_tensor_spec(ShardSpec([0], [3]), TP1D)


def unequal_parts() -> None:
    parameter = ColoParameter(torch.ones(5, 2), spec=ColoTensorSpec(ProcessGroup(tp_degree=2)))
    parameter.set_tensor_spec(ShardSpec([0], [2]), TP1D)


def no_dimension() -> None:
    parameter = ColoParameter(torch.ones(4), spec=ColoTensorSpec(ProcessGroup(tp_degree=2)))
    parameter.set_tensor_spec(ShardSpec([1], [2]), TP1D)


def other_ranks() -> None:
    parameter = ColoParameter(torch.ones(4), spec=ColoTensorSpec(ProcessGroup(tp_degree=2)))
    parameter.set_process_group(ProcessGroup())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardSpec([0, 1], [2, 2]), "splits 2 dimensions"),
        (lambda: ComputeSpec(ComputePattern.TP2D), "TP2D is not supported"),
        (lambda: ProcessGroup(tp_degree=3), "does not divide the world of 2 ranks: choose one of 1, 2"),
        (lambda: ProcessGroup(tp_degree=2, dp_degree=2), "is not the world of 2 ranks"),
        (wrong_parts, "does not have one part for each of 1 tensor ranks"),
        (unequal_parts, r"shape \(5, 2\) does not divide into 2 equal parts"),
        (no_dimension, r"a dimension that a tensor of shape \(4,\) lacks"),
        (other_ranks, "make it whole first"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], object], message: str) -> None:
    def refused() -> None:
        with pytest.raises(UsageError, match=message):
            make()

    run_threads(refused, 2, data=2)


def test_a_pipeline_has_no_process_group() -> None:
    def refused() -> None:
        with pytest.raises(UsageError, match="launch without pipeline="):
            ProcessGroup(tp_degree=2)

    run_threads(refused, 2)
    with pytest.raises(UsageError, match="there is no context"):
        ProcessGroup()
