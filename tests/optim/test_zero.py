"""States that are spread over the data ranks: the same weights to the last bit, each state on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_map

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.gradients import weights as owners_module
from pipeflow.engine.runtime.other_calls import held_step
from pipeflow.optim import LossScaler, MasterWeights, Zero, clip_grad_norm_, load_named_state, named_state
from pipeflow.testing import run_processes, run_threads
from tests.training import blocks

Weights = dict[str, numpy.ndarray]
DTYPE = torch.float32


def sgd(pipeline: Pipeline) -> Optimizer:
    return SGD(pipeline.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def adamw(pipeline: Pipeline) -> Optimizer:
    """With two groups, of which the second has few parameters."""
    scales = [p for name, p in pipeline.named_parameters() if name.endswith("scale")]
    others = [p for name, p in pipeline.named_parameters() if not name.endswith("scale")]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": scales, "weight_decay": 0.0, "lr": 0.02}]
    return AdamW(groups, lr=0.01)


def bare(_: Pipeline, optimizer: Optimizer) -> Optimizer:
    return optimizer


def masters(pipeline: Pipeline, optimizer: Optimizer) -> Optimizer:
    return MasterWeights(pipeline, optimizer, scaler=LossScaler(initial_scale=64.0, growth_interval=2))


def zero(pipeline: Pipeline, optimizer: Optimizer) -> Optimizer:
    return Zero(pipeline, optimizer)


def masters_of_zero(pipeline: Pipeline, optimizer: Optimizer) -> Optimizer:
    return masters(pipeline, Zero(pipeline, optimizer))


Make = Callable[[Pipeline], Optimizer]
Wrap = Callable[[Pipeline, Optimizer], Optimizer]


def take_step(pipeline: Pipeline, optimizer: Optimizer, step: int, dtype: torch.dtype) -> None:
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in pipeline.parameters())
    execute_pipeline(blocks.mine(step, dtype), pipeline)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()


def weights_of(pipeline: Pipeline) -> Weights:
    return {name: p.detach().double().numpy().copy() for name, p in pipeline.named_parameters()}


def train(make: Make, wrap: Wrap, dtype: torch.dtype, steps: int) -> tuple[Weights, dict[str, list[str]]]:
    """The weights after `steps`, and which states of which parameters this rank has."""
    pipeline = blocks.build(dtype)
    optimizer = wrap(pipeline, make(pipeline))
    for step in range(steps):
        take_step(pipeline, optimizer, step, dtype)
    return weights_of(pipeline), {name: sorted(state) for name, state in named_state(optimizer, pipeline).items()}


def require_equal(results: list[Any], expected: list[Any]) -> None:
    for (weights, _), (wanted, _) in zip(results, expected, strict=True):
        assert set(weights) == set(wanted)
        for name, value in weights.items():
            assert numpy.array_equal(value, wanted[name]), name


@pytest.mark.some(1)
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(
    ("wrap", "plain", "dtype"), [(zero, bare, DTYPE), (masters_of_zero, masters, torch.bfloat16)], ids=["plain", "half"]
)
def test_zero_changes_no_bit(
    make: Make, wrap: Wrap, plain: Wrap, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners_module, "BUCKET", 400)  # bytes, so that there are many
    results, expected = (run_threads(train, 12, make, each, dtype, 4, tensor=2, data=3) for each in (wrap, plain))
    require_equal(results, expected)
    for rank in range(4):  # of each replica
        held = [results[rank + 4 * replica][1] for replica in range(3)]
        assert all(held)
        merged = {name: states for one in held for name, states in one.items()}
        assert merged == expected[rank][1]
        assert sum(map(len, held)) == len(merged)  # each on one rank


class Mixed(torch.nn.Module):
    """Weights of 16 bits and of 32 of one owner, whose gradients are both in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Parameter(torch.full((4,), 0.25, dtype=torch.bfloat16))
        self.wide = torch.nn.Parameter(torch.full((4,), 1.001))
        self.large = torch.nn.Parameter(torch.ones(8))


def step_mixed() -> list[float]:
    module = Mixed()
    pipeline = Pipeline(module, make_schedule("1f1b", ranks=1, microbatches=1))
    module.narrow.grad_dtype = torch.float32
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4, dtype=torch.float32)
    optimizer = MasterWeights(pipeline, Zero(pipeline, SGD(pipeline.parameters(), lr=1.0)))
    optimizer.step()
    return module.wide.tolist()


def test_weights_of_several_dtypes_are_exchanged_apart() -> None:
    expected = [float(torch.tensor(1.001) - torch.tensor(1e-4))] * 4
    assert run_threads(step_mixed, 2, data=2) == [expected] * 2


@pytest.mark.slow
def test_gloo() -> None:
    arguments = (adamw, masters_of_zero, torch.float16, 3)
    results = run_processes(train, 4, *arguments, data=2)
    require_equal(results, run_threads(train, 4, *arguments, data=2))


class Sizes(torch.nn.Module):
    """Weights of these sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(size) for size in (1, 5, 3, 8, 3, 4))


def owned() -> int:
    pipeline = Pipeline(Sizes(), make_schedule("1f1b", ranks=1, microbatches=1))
    return sum(parameter.numel() for parameter in Zero(pipeline, sgd(pipeline)).stepped)


def test_owners_have_as_much_as_can_be() -> None:
    assert run_threads(owned, 3, data=3) == [8, 8, 8]


def more_ranks_than_parameters() -> Weights:
    pipeline = blocks.build(DTYPE)
    only = [parameter for name, parameter in pipeline.named_parameters() if name.endswith("0.up.weight")]
    optimizer = Zero(pipeline, AdamW(only))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    take_step(pipeline, optimizer, 0, DTYPE)
    scheduler.step()
    assert len(optimizer.stepped) == (1 if current_context().data_rank == 0 else 0)
    return weights_of(pipeline)


def test_a_rank_may_own_nothing() -> None:
    first, *others = run_threads(more_ranks_than_parameters, 3, data=3)
    for weights in others:
        assert all(numpy.array_equal(weights[name], first[name]) for name in first)


Saved = tuple[Any, Any]  # the states of an optimizer and of a model


def save(wrap: Wrap, dtype: torch.dtype) -> tuple[Weights, Saved]:
    """Two steps, saved after one."""
    pipeline = blocks.build(dtype)
    optimizer = wrap(pipeline, adamw(pipeline))
    take_step(pipeline, optimizer, 0, dtype)
    optimizer.param_groups[0]["lr"] = 0.007
    saved = copied((optimizer.state_dict(), pipeline.state_dict()))
    take_step(pipeline, optimizer, 1, dtype)
    return weights_of(pipeline), saved


def go_on(wrap: Wrap, dtype: torch.dtype, saved: list[Saved]) -> tuple[Weights, None]:
    """The second step alone, from what the ranks saved that hold the same weights."""
    pipeline, context = blocks.build(dtype), current_context()
    optimizer = wrap(pipeline, adamw(pipeline))
    states = copied([saved[rank] for rank in context.layout.data_ranks(context.rank)])
    pipeline.load_state_dict(states[0][1])
    named = {name: entry for one, _ in states for name, entry in one["state"].items()}
    if wrap is bare:
        load_named_state(optimizer, pipeline, named)
        optimizer.param_groups[0]["lr"] = 0.007
    else:
        optimizer.load_state_dict({**states[0][0], "state": named})
    take_step(pipeline, optimizer, 1, dtype)
    return weights_of(pipeline), None


def copied(tree: Any) -> Any:
    return tree_map(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, tree)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        (zero, zero, DTYPE),
        (zero, bare, DTYPE),
        (masters_of_zero, masters, torch.bfloat16),
        (masters, masters_of_zero, torch.bfloat16),
        (masters_of_zero, masters_of_zero, torch.float16),
    ],
)
def test_saved_states_of_the_ranks_merge_and_part_again(before: Wrap, after: Wrap, dtype: torch.dtype) -> None:
    first = run_threads(save, 8, before, dtype, tensor=2, data=2)
    second = run_threads(go_on, 8, after, dtype, [saved for _, saved in first], tensor=2, data=2)
    require_equal(second, first)


def load_too_little() -> None:
    pipeline = blocks.build(DTYPE)
    optimizer = adamw(pipeline)
    states = named_state(optimizer, pipeline)
    missing = next(iter(states))
    del states[missing]
    with pytest.raises(UsageError, match=f"the saved optimizer lacks '{missing}' and 0 more"):
        load_named_state(optimizer, pipeline, states)
    with pytest.raises(UsageError, match="MasterWeights\\(model, Zero"):
        Zero(pipeline, MasterWeights(pipeline, optimizer))
    saved = Zero(pipeline, adamw(pipeline)).state_dict()
    saved["param_groups"].pop()
    with pytest.raises(UsageError, match="has 1 groups, but this one 2"):
        Zero(pipeline, adamw(pipeline)).load_state_dict(saved)


def test_misuse() -> None:
    run_threads(load_too_little, 1)


def fail_on_one() -> str:
    pipeline = blocks.build(DTYPE)
    optimizer = Zero(pipeline, sgd(pipeline))
    execute_pipeline(blocks.mine(0, DTYPE), pipeline)
    if current_context().rank == 2:
        optimizer.inner.step = None  # type: ignore[method-assign, assignment]
    with pytest.raises(PipelineError) as caught:
        step_and_go_on(pipeline, optimizer)
    return str(caught.value.rank)


def step_and_go_on(pipeline: Pipeline, optimizer: Optimizer) -> None:
    """Ranks that exchange nothing with the one that fails hear of it in the next step."""
    optimizer.step()
    execute_pipeline(blocks.mine(0, DTYPE), pipeline)


def test_a_step_that_fails_on_one_rank_fails_on_all() -> None:
    assert run_threads(fail_on_one, 4, data=2, timeout=60.0) == ["2"] * 4


def step_sharded() -> tuple[float, float, Weights]:
    """Two steps of a model in bfloat16 under fully_shard, with masters; the norms, and one weight."""
    context = current_context()
    modules = [blocks.Block(index, torch.bfloat16) for index in range(2)]
    for module in modules:
        fully_shard(module, mesh=context.mesh["data"])
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    pipeline = Pipeline(torch.nn.Sequential(*modules), schedule, criterion=torch.nn.functional.mse_loss)
    with pytest.raises(UsageError, match="use the optimizer without Zero"):
        Zero(pipeline, sgd(pipeline))
    return step_masters(pipeline)


def step_whole() -> tuple[float, float, Weights]:
    modules = [blocks.Block(index, torch.bfloat16) for index in range(2)]
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    return step_masters(Pipeline(torch.nn.Sequential(*modules), schedule, criterion=torch.nn.functional.mse_loss))


def step_masters(pipeline: Pipeline) -> tuple[float, float, Weights]:
    optimizer, norms = MasterWeights(pipeline, sgd(pipeline)), []
    for step in range(2):
        optimizer.zero_grad()
        execute_pipeline(blocks.mine(step, torch.bfloat16), pipeline)
        norms.append(clip_grad_norm_(pipeline, 0.5).item())
        optimizer.step()
    masters = {name: entry["master"] for name, entry in named_state(optimizer, pipeline).items()}
    whole = {name: m.full_tensor() if isinstance(m, DTensor) else m for name, m in masters.items()}
    return norms[0], norms[1], {name: master.numpy().copy() for name, master in whole.items()}


@pytest.mark.slow
def test_masters_of_fully_sharded_weights() -> None:
    expected = run_threads(step_whole, 2, data=2)
    for (first, second, masters), (norm, other, wanted) in zip(
        run_processes(step_sharded, 2, data=2), expected, strict=True
    ):
        assert (first, second) == pytest.approx((norm, other), rel=1e-2)  # averaged in another order, in 16 bits
        for name, master in masters.items():
            assert numpy.allclose(master, wanted[name], atol=2e-3), name


def norms_of(pipeline: Pipeline) -> dict[str, float | None]:
    return {name: None if p.grad is None else float(p.grad.norm()) for name, p in pipeline.named_parameters()}


def run_calls(calls: list[str], divided: bool) -> tuple[Weights, dict[str, float | None]]:
    """The weights after these calls and a step; and the norms of the gradients before the step."""
    pipeline = blocks.build(torch.float64)
    optimizer: Optimizer = SGD(pipeline.parameters(), lr=0.05)
    optimizer = Zero(pipeline, optimizer) if divided else optimizer
    for step, call in enumerate(calls):
        batch = blocks.mine(step, torch.float64)
        if call == "clear":
            optimizer.zero_grad()
        elif call == "zero":
            optimizer.zero_grad(set_to_none=False)
        elif call == "halve":
            for parameter in pipeline.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / 2
        elif call == "held":
            held_step(batch, pipeline).release()
        elif call == "freeze":
            next(iter(pipeline.parameters())).requires_grad_(False)
        else:
            execute_pipeline(batch, pipeline, reduce=call == "reduce")
    norms = norms_of(pipeline)
    optimizer.step()
    return weights_of(pipeline), norms


@pytest.mark.parametrize(
    "calls",
    [
        ["reduce"],
        ["alone", "reduce"],
        ["reduce", "reduce", "reduce"],
        ["reduce", "alone", "alone", "reduce"],
        ["reduce", "halve", "reduce"],
        ["reduce", "zero", "reduce", "clear", "alone", "reduce"],
        ["held", "held", "reduce"],
        ["reduce", "freeze", "reduce", "reduce"],
    ],
    ids="-".join,
)
def test_gradients_that_only_owners_have_are_those_of_all(calls: list[str]) -> None:
    results, expected = (run_threads(run_calls, 6, calls, each, data=3) for each in (True, False))
    for (weights, _), (wanted, _) in zip(results, expected, strict=True):
        for name, value in weights.items():
            assert value == pytest.approx(wanted[name], rel=1e-12), name
    for rank in range(2):
        held = [results[rank + 2 * replica][1] for replica in range(3)]
        for name, norm in expected[rank][1].items():
            found = [each[name] for each in held if each[name] is not None]
            assert found == pytest.approx([norm], rel=1e-12), name


def step_another() -> tuple[list[str], str]:
    """What an optimizer of divided weights, and a gradient of another rank's weight, say; and a Zero of it does."""
    pipeline = blocks.build(DTYPE)
    optimizer = sgd(pipeline)
    Zero(pipeline, adamw(pipeline))
    execute_pipeline(blocks.mine(0, DTYPE), pipeline)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    Zero(pipeline, optimizer).step()
    for parameter in pipeline.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises((UsageError, PipelineError)) as second:
        execute_pipeline(blocks.mine(0, DTYPE), pipeline)
    optimizer.zero_grad()
    return [str(caught.value)], str(second.value)


def step_masters_of_divided() -> str:
    """What masters of divided weights say, which are tensors of their own."""
    pipeline = blocks.build(torch.bfloat16)
    masters = MasterWeights(pipeline, sgd(pipeline))
    Zero(pipeline, adamw(pipeline))
    with pytest.raises((UsageError, PipelineError)) as caught:
        masters.step()
    return str(caught.value)


def test_other_optimizers_and_gradients_of_divided_weights_are_refused() -> None:
    for told in run_threads(step_masters_of_divided, 2, data=2):
        assert "SGD steps parameters that a Zero has divided" in told
    for [first], second in run_threads(step_another, 2, data=2):
        assert "SGD steps parameters that a Zero has divided" in first
        assert "clear gradients before the next batch" in second
