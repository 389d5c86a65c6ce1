"""The gradient norm over a pipeline is that of the plain model, in which a tied weight is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeflow import (
    Pipeline,
    PipelineError,
    PipelineSharedModuleWrapper,
    UsageError,
    clip_grad_norm_,
    execute_pipeline,
    make_schedule,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import Split
from pipeflow.optim import MasterWeights, Zero, grad_norm
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel
from tests.runtime.work import Gradients, build, gradients_of, require_near, schedule_of
from tests.training import blocks

Variant = tuple[str, int, int]
VARIANTS = [("1f1b", 1, 1), ("interleaved-1f1b", 1, 2), ("1f1b", 2, 1), ("interleaved-1f1b", 2, 2), ("gpipe", 4, 1)]


def run_clipping(model: TinyModel, variant: Variant, max_norms: list[float]) -> list[tuple[float, Gradients]]:
    pipeline = build(model, schedule_of(variant, 3))
    told = []
    for max_norm in max_norms:
        pipeline.zero_grad()
        execute_pipeline(iter([model.batch(7)]), pipeline)
        norm = clip_grad_norm_(pipeline, max_norm)
        assert (norm.dtype, norm.shape) == (torch.float64, ())
        told.append((norm.item(), gradients_of(pipeline)))
    return told


def require_clipped(model: TinyModel, max_norms: list[float], results: list[list[tuple[float, Gradients]]]) -> None:
    for index, max_norm in enumerate(max_norms):
        module = model.stage(0, model.layers)
        _, gradients = model.plain_step(model.batch(7), module)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        assert len({result[index][0] for result in results}) == 1
        for result in results:
            assert result[index][0] == pytest.approx(norm.item(), rel=1e-12)
            require_near(result[index][1], gradients, 1e-5)  # torch adds 1e-6 to the norm it divides by


NORMS = [1e-3, 0.05, 100.0]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("model", [PlainModel(), TiedModel()], ids=str)
def test_threads(model: TinyModel, variant: Variant) -> None:
    require_clipped(model, NORMS, run_threads(run_clipping, variant[1], model, variant, NORMS))


@pytest.mark.exhaustive
def test_gloo() -> None:
    require_clipped(TiedModel(), NORMS, run_processes(run_clipping, 4, TiedModel(), ("1f1b", 4, 1), NORMS))


def run_without_gradients() -> float:
    pipeline = build(TiedModel(), schedule_of(("1f1b", 2, 1), 2))
    return clip_grad_norm_(pipeline, 1.0).item()


def test_without_gradients_the_norm_is_zero() -> None:
    assert run_threads(run_without_gradients, 2) == [0.0, 0.0]


def run_bad(max_norms: list[Any]) -> str:
    pipeline = build(TiedModel(), schedule_of(("1f1b", 2, 1), 2))
    mine = max_norms[current_context().pipeline_rank]
    with pytest.raises((UsageError, PipelineError)) as caught:
        clip_grad_norm_(pipeline, mine)
    return str(caught.value)


def test_a_norm_that_is_not_positive_is_refused() -> None:
    for bad in (0.0, -1.0, float("nan")):
        assert run_threads(run_bad, 2, [bad, bad]) == [f"max_norm must be positive, got {bad}"] * 2


Shape = tuple[int, int, int]
HYBRID: list[Shape] = [(1, 1, 2), (1, 2, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)]


def run_hybrid(max_norm: float, loss_scale: float) -> tuple[float, float]:
    """The norm alone and when clipping; the clipped gradients are this rank's parts of the whole's."""
    pipeline = blocks.build()
    pipeline.loss_scale = loss_scale
    execute_pipeline(blocks.mine(0), pipeline)
    alone = grad_norm(pipeline)
    norm = clip_grad_norm_(pipeline, max_norm)
    module = blocks.whole()
    inputs, labels = blocks.together(current_context().data_size, 0)
    torch.nn.functional.mse_loss(module(inputs), labels).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    parameters, names = dict(pipeline.named_parameters()), blocks.names_in_whole(pipeline)
    for name, parameter in parameters.items():
        wanted, mine = expected[names[name]], parameter.grad
        assert wanted is not None
        assert mine is not None
        torch.testing.assert_close(mine / loss_scale, blocks.part_of(names[name], wanted), rtol=1e-5, atol=1e-9)
    return alone.item(), norm.item()


def hybrid_norm(replicas: int) -> float:
    module = blocks.whole()
    inputs, labels = blocks.together(replicas, 0)
    torch.nn.functional.mse_loss(module(inputs), labels).backward()
    return torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0).item()


@pytest.mark.some(3)
@pytest.mark.parametrize("shape", HYBRID, ids=str)
def test_split_weights_and_replicas_count_once(shape: Shape) -> None:
    pipeline, tensor, data = shape
    expected = pytest.approx(hybrid_norm(data), rel=1e-12)
    for max_norm, loss_scale in ((0.01, 1.0), (100.0, 1.0), (0.01, 1024.0)):
        results = run_threads(run_hybrid, pipeline * tensor * data, max_norm, loss_scale, tensor=tensor, data=data)
        assert len(set(results)) == 1
        for alone, norm in results:
            assert alone == norm == expected


class Tables(nn.Module):
    """Rows of a table that tensor ranks divide, and which is on the first and on the last stage; and a whole weight."""

    def __init__(self) -> None:
        super().__init__()
        context = current_context()
        self.table = nn.Parameter(torch.zeros(8 // context.tensor_size, 3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def splits(self) -> dict[str, Split]:
        return {"table": Split(0, 8)}

    def partial_gradients(self) -> list[str]:
        return []


def run_tied_and_split() -> float:
    context = current_context()
    module, last = Tables(), context.pipeline_size - 1
    tie = PipelineSharedModuleWrapper([0, last])
    if context.pipeline_rank in (0, last):
        tie.register_parameter(module.table)
    pipeline = Pipeline(module, make_schedule("1f1b", ranks=last + 1, microbatches=1))
    table, biases = tied_and_split(last + 1)
    if context.pipeline_rank in (0, last):
        module.table.grad = table.chunk(context.tensor_size)[context.tensor_rank].clone()
    module.bias.grad = biases[context.pipeline_rank].clone()
    return grad_norm(pipeline).item()


def tied_and_split(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, generator=generator, dtype=torch.float64), torch.randn(
        ranks, 5, generator=generator, dtype=torch.float64
    )


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 2, 1), (2, 4, 1), (3, 1, 2)], ids=str)
def test_a_weight_that_is_tied_and_split_counts_once(shape: Shape) -> None:
    pipeline, tensor, data = shape
    table, biases = tied_and_split(pipeline)
    expected = torch.cat([table.flatten(), biases.flatten()]).norm().item()
    for norm in run_threads(run_tied_and_split, pipeline * tensor * data, tensor=tensor, data=data):
        assert norm == pytest.approx(expected, rel=1e-12)


def run_overflow(bad: int, value: float) -> tuple[float, bool]:
    pipeline = blocks.build()
    execute_pipeline(blocks.mine(0), pipeline)
    gradients = [parameter.grad for parameter in pipeline.parameters() if parameter.grad is not None]
    if current_context().rank == bad:
        gradients[0].view(-1)[0] = value
    before = [gradient.clone() for gradient in gradients]
    norm = clip_grad_norm_(pipeline, 1e-3)
    kept = [torch.allclose(mine, old, 0, 0, equal_nan=True) for mine, old in zip(gradients, before, strict=True)]
    return norm.item(), all(kept)


@pytest.mark.parametrize(("bad", "value"), [(0, float("inf")), (3, float("nan")), (7, -float("inf"))])
def test_a_norm_that_is_not_finite_is_so_everywhere(bad: int, value: float) -> None:
    """It is that of torch."""
    expected = str(nn.utils.get_total_norm([torch.tensor([value, 1.0])]).item())
    found = run_threads(run_overflow, 8, bad, value, tensor=2, data=2)
    assert [(str(norm), kept) for norm, kept in found] == [(expected, True)] * 8


def test_parameters_are_refused_in_the_place_of_the_pipeline() -> None:
    def rank() -> None:
        pipeline = blocks.build()
        with pytest.raises(UsageError, match=r"pass the Pipeline, clip_grad_norm_\(model, 1.0\), not generator"):
            clip_grad_norm_(pipeline.parameters(), 1.0)  # type: ignore[arg-type]  # what torch's takes
        with pytest.raises(UsageError, match=r"pass the Pipeline, grad_norm\(model\), not list"):
            grad_norm([*pipeline.parameters()])  # type: ignore[arg-type]  # same

    run_threads(rank, 2)


def clip_with_torch(has_owners: bool = False) -> tuple[str, str, float, float]:
    """What torch's function says to the Pipeline's parameters, and to those of a generator; two norms of a list."""
    pipeline = blocks.build()
    if has_owners:
        Zero(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1))
    execute_pipeline(iter([blocks.batch(current_context().data_rank, 0)]), pipeline)
    told = []
    for parameters in (pipeline.parameters(), (each for each in pipeline.parameters() if each.requires_grad)):
        try:
            told.append(f"{nn.utils.clip_grad_norm_(parameters, 1e9):.6f}")
        except UsageError as error:
            told.append(str(error))
    gradients = [each.grad for each in pipeline.parameters() if each.grad is not None]
    nn.utils.clip_grads_with_norm_(pipeline.parameters(), 1e9, nn.utils.get_total_norm(gradients))  # any norm
    return told[0], told[1], float(grad_norm(pipeline)), float(nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"data": 2}], ids=["pipeline", "tensor", "zero"])
def test_torchs_clipping_names_that_of_pipeflow_where_a_rank_has_a_part(layout: dict[str, Any]) -> None:
    for first, second, whole, own in run_threads(clip_with_torch, 2, "data" in layout, **layout):
        assert "call pipeflow.clip_grad_norm_(pipeline, max_norm)" in first
        assert second == first
        assert own < whole


def test_torchs_clipping_of_whole_gradients_is_that_of_pipeflow() -> None:
    for first, second, whole, _ in run_threads(clip_with_torch, 2, data=2):
        assert first == second == f"{whole:.6f}"


ORDERS = [1.0, 2.0, 3.5, 60.0, math.inf]


def run_orders(order: float, max_norm: float) -> tuple[float, float]:
    """The clipped gradients are this rank's parts of the whole's."""
    pipeline = blocks.build()
    execute_pipeline(blocks.mine(0), pipeline)
    norm = clip_grad_norm_(pipeline, max_norm, order)
    module = blocks.whole()
    inputs, labels = blocks.together(current_context().data_size, 0)
    torch.nn.functional.mse_loss(module(inputs), labels).backward()
    wanted = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm, order)
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    names = blocks.names_in_whole(pipeline)
    for name, parameter in pipeline.named_parameters():
        whole = expected[names[name]]
        assert whole is not None
        torch.testing.assert_close(parameter.grad, blocks.part_of(names[name], whole), rtol=1e-5, atol=1e-12)
    return norm.item(), wanted.item()


@pytest.mark.some(3)
@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_any_order(order: float) -> None:
    results = run_threads(run_orders, 8, order, 1e-3, tensor=2, data=2)
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-12)


def replace_then_measure() -> float:
    """The norm when a parameter was replaced since the last step, by one whose gradient has the norm 3."""
    layer = nn.Linear(4, 9, bias=False)
    pipeline = Pipeline(layer, make_schedule("1f1b", ranks=1, microbatches=1), criterion=nn.functional.mse_loss)
    execute_pipeline(iter([(torch.ones(2, 4), torch.ones(2, 9))]), pipeline)
    layer.weight = nn.Parameter(torch.zeros(9, 1))
    layer.weight.grad = torch.ones(9, 1)
    return float(grad_norm(pipeline))


def test_a_norm_is_that_of_the_parameters_that_there_are() -> None:
    assert run_threads(replace_then_measure, 2, data=2) == [3.0, 3.0]


def clip_twice() -> float:
    """The norm at a second clipping, if an optimizer with masters has some of the parameters of a bucket."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = Pipeline(layers, make_schedule("1f1b", ranks=1, microbatches=1), criterion=nn.functional.mse_loss)
    optimizer = MasterWeights(pipeline, torch.optim.SGD(layers[0].parameters(), lr=0.1))
    execute_pipeline(iter([(torch.ones(2, 4), torch.full((2, 4), 9.0))]), pipeline)
    clip_grad_norm_(pipeline, 1.0)
    norm = float(clip_grad_norm_(pipeline, 0.5))
    optimizer.step()
    return norm


def test_a_second_clipping_sees_the_first() -> None:
    assert run_threads(clip_twice, 2, data=2) == pytest.approx([1.0, 1.0], rel=1e-5)


def refuse_orders() -> None:
    pipeline = blocks.build()
    for order in (0.0, -2.0, math.nan):
        with pytest.raises(UsageError, match="norm_type must be positive"):
            clip_grad_norm_(pipeline, 1.0, order)


def test_orders_without_sense() -> None:
    run_threads(refuse_orders, 1)


class Other(nn.Module):
    """Complex weights, a sparse gradient and one without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        self.words = nn.Parameter(torch.zeros(5, 2))
        self.none = nn.Parameter(torch.zeros(0, 3))


def clip_others(order: float) -> None:
    module = Other()
    pipeline = Pipeline(module, make_schedule("1f1b", ranks=1, microbatches=1))
    wave, rows = torch.randn(4, dtype=torch.complex64), torch.randn(3, 2)
    module.wave.grad, module.none.grad = wave.clone(), torch.zeros(0, 3)
    module.words.grad = torch.sparse_coo_tensor(torch.tensor([[1, 4, 1]]), rows, (5, 2), check_invariants=True)
    dense = module.words.grad.to_dense()
    expected = torch.cat([wave.abs().double(), dense.flatten().double()]).norm(order)
    norm = clip_grad_norm_(pipeline, 0.1, order)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(module.wave.grad, wave * (0.1 / norm).float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(module.words.grad.to_dense(), dense * (0.1 / norm).float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_complex_and_sparse_gradients(order: float) -> None:
    run_threads(clip_others, 1, order)


def norm_of_distributed() -> float:
    """Of 2 replicas of 2 tensor ranks: a weight in torch's parts over the tensor ranks, one that torch holds whole."""
    context = current_context()
    module = Tables()
    pipeline = Pipeline(module, make_schedule("1f1b", ranks=1, microbatches=1))
    mesh = context.mesh["tensor"]
    for name, placement in (("table", Shard(0)), ("bias", Replicate())):
        whole = torch.arange(8.0).to(torch.float64)
        local = whole.chunk(2)[context.tensor_rank] if isinstance(placement, Shard) else whole
        parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(local), mesh, [placement]))
        module.register_parameter(name, parameter)
        parameter.grad = DTensor.from_local(local, mesh, [placement])
    module.splits = dict  # type: ignore[method-assign]
    return grad_norm(pipeline).item()


def test_what_torch_holds_in_parts_counts_once() -> None:
    expected = math.sqrt(2) * torch.arange(8.0).double().norm().item()
    assert run_processes(norm_of_distributed, 4, tensor=2, data=2) == [pytest.approx(expected, rel=1e-12)] * 4
