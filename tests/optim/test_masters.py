"""Masters do what float32 would, whatever the parameters are rounded to; an overflow anywhere is one everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from pipeflow import Pipeline, UsageError, execute_pipeline, load_checkpoint, save_checkpoint
from pipeflow.engine.parallel.context import current_context
from pipeflow.optim import HalfPrecision, LossScaler, MasterWeights, clip_grad_norm_, grad_norm
from pipeflow.testing import run_threads
from pipeflow.testing.models import TiedModel, Words
from tests.runtime.work import build, schedule_of
from tests.training import blocks

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def adamw(pipeline: Pipeline) -> AdamW:
    return AdamW(pipeline.parameters(), lr=0.01)


def one_step(dtype: torch.dtype, scale: float, max_norm: float) -> None:
    """The masters after two steps are what the plain optimizer makes of the gradients as float32."""
    pipeline = blocks.build(dtype)
    starts = [parameter.detach().float() for parameter in pipeline.parameters()]
    plain = [torch.nn.Parameter(start) for start in starts]
    expected = AdamW(plain, lr=0.01)
    scaler = LossScaler(initial_scale=scale, growth_interval=1)
    optimizer = MasterWeights(pipeline, adamw(pipeline), scaler=scaler)
    for step in range(2):
        assert pipeline.loss_scale == scaler.scale == scale * 2**step
        optimizer.zero_grad()
        execute_pipeline(blocks.mine(step, dtype), pipeline)
        norm = clip_grad_norm_(pipeline, max_norm)
        assert norm == grad_norm(pipeline)
        for parameter, value in zip(plain, pipeline.parameters(), strict=True):
            value_grad = value.grad
            assert value_grad is not None
            assert value_grad.dtype == dtype
            parameter.grad = value_grad.float() / scaler.scale
            parameter.grad *= min(1.0, max_norm / (norm.item() + 1e-6))
        optimizer.step()
        expected.step()
    for wanted, (parameter, master) in zip(plain, optimizer.stepped.items(), strict=True):
        assert torch.equal(master, wanted)
        assert torch.equal(parameter, wanted.to(dtype))


def clip_twice(dtype: torch.dtype) -> None:
    """As torch does where gradients are scaled at once; new gradients are not scaled by what was asked of the old."""
    pipeline = blocks.build(dtype)
    optimizer = MasterWeights(pipeline, SGD(pipeline.parameters(), lr=1.0))
    before = [master.detach().clone() for master in optimizer.stepped.values()]
    for repeated in (False, True):
        optimizer.zero_grad()
        execute_pipeline(blocks.mine(0, dtype), pipeline)
        norm = clip_grad_norm_(pipeline, 0.5)
        assert norm == grad_norm(pipeline) > 0.5
        assert clip_grad_norm_(pipeline, 0.25, 2.0).item() == pytest.approx(0.5, rel=1e-4)
        assert clip_grad_norm_(pipeline, 10.0).item() == pytest.approx(0.25, rel=1e-4), repeated
    gradients = [parameter.grad.float() for parameter in optimizer.stepped if parameter.grad is not None]
    optimizer.step()
    for start, gradient, master in zip(before, gradients, optimizer.stepped.values(), strict=True):
        torch.testing.assert_close(start - master, gradient * 0.25 / norm.item(), rtol=1e-3, atol=1e-6)


@HALVES
def test_clipping_again_counts_what_was_clipped(dtype: torch.dtype) -> None:
    run_threads(clip_twice, 4, dtype, tensor=2)


@pytest.mark.some(1)
@HALVES
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_masters_are_stepped_in_float32(dtype: torch.dtype, max_norm: float) -> None:
    run_threads(one_step, 8, dtype, 64.0, max_norm, tensor=2, data=2)


def train(dtype: torch.dtype, masters: bool, steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """By steps that are often smaller than what 16 bits can tell from a weight; the weights that were stepped."""
    pipeline = blocks.build(dtype)
    optimizer: Optimizer = SGD(pipeline.parameters(), lr=1e-3)
    if masters:
        scaler = LossScaler(initial_scale=256.0) if dtype == torch.float16 else None
        optimizer = MasterWeights(pipeline, optimizer, scaler=scaler)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = execute_pipeline(blocks.mine(0, dtype), pipeline, broadcast_loss=True).loss
        assert loss is not None
        losses.append(float(loss))
        optimizer.step()
    stepped = [value for group in optimizer.param_groups for value in group["params"]]
    return dict(
        zip(blocks.names_in_whole(pipeline).values(), (v.detach().float() for v in stepped), strict=True)
    ), losses


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max(float((some[name] - others[name]).norm() / others[name].norm()) for name in some)


@HALVES
@pytest.mark.slow
def test_masters_track_float32(dtype: torch.dtype) -> None:
    exact, rounded, alone = (
        run_threads(train, 4, kind, masters, 40, tensor=2)
        for kind, masters in ((torch.float32, False), (dtype, True), (dtype, False))
    )
    for (wanted, losses), (found, others), (lost, _) in zip(exact, rounded, alone, strict=True):
        assert losses[-1] < 0.99 * losses[0]
        assert others[-1] == pytest.approx(losses[-1], rel=0.02)
        assert 5 * distance(found, wanted) < distance(lost, wanted)


def overflow(bad: int, clip: bool, fused: bool) -> list[tuple[int, float, bool]]:
    """Three steps; in the second a gradient of one rank overflows. Per step: skipped so far, scale, whether moved."""
    pipeline = blocks.build(torch.float16)
    scaler = LossScaler(initial_scale=256.0, hysteresis=1)
    plain = AdamW(pipeline.parameters(), lr=0.01, weight_decay=0.1, fused=fused)  # without fused, in Python
    optimizer = MasterWeights(pipeline, plain, scaler=scaler)
    told = []
    for step in range(3):
        optimizer.zero_grad()
        execute_pipeline(blocks.mine(step, torch.float16), pipeline)
        if step == 1 and current_context().rank == bad:
            list(pipeline.parameters())[-1].grad[0] = float("inf")  # type: ignore[index]
        before = [parameter.detach().clone() for parameter in pipeline.parameters()]
        masters = [master.detach().clone() for master in optimizer.stepped.values()]
        if clip:
            assert clip_grad_norm_(pipeline, 0.1).isfinite() == (step != 1)
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
        same = [torch.equal(*pair) for pair in zip(before, pipeline.parameters(), strict=True)]
        same += [torch.equal(*pair) for pair in zip(masters, optimizer.stepped.values(), strict=True)]
        told.append((optimizer.skipped, float(pipeline.loss_scale), not all(same)))
    return told


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("bad", "clip", "fused"), [(0, False, False), (3, True, True), (6, False, True), (7, True, False)]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(bad: int, clip: bool, fused: bool) -> None:
    expected = [(0, 256.0, True), (1, 128.0, False), (1, 128.0, True)]
    assert run_threads(overflow, 8, bad, clip, fused, tensor=2, data=2) == [expected] * 8


def test_the_kernels_of_a_fused_optimizer_skip_a_step_that_overflowed() -> None:
    expected = [(0, 256.0, True), (1, 128.0, False), (1, 128.0, True)]
    assert run_threads(overflow, 2, 1, False, True) == [expected] * 2


def tied(dtype: torch.dtype) -> tuple[list[torch.Tensor], float]:
    model = TiedModel(dtype=dtype)
    pipeline = build(model, schedule_of(("1f1b", 2, 1), 3))
    optimizer = MasterWeights(pipeline, adamw(pipeline), scaler=LossScaler(initial_scale=64.0))
    norm = 0.0
    for seed in range(4):
        optimizer.zero_grad()
        execute_pipeline(iter([model.batch(7, seed=seed)]), pipeline)
        norm = clip_grad_norm_(pipeline, 0.5).item()
        optimizer.step()
    [words] = [module for module in pipeline.modules() if isinstance(module, Words)]
    return [words.weight.detach(), optimizer.stepped[words.weight].detach()], norm


@HALVES
def test_tied_weights_and_their_masters_keep_the_same_bits(dtype: torch.dtype) -> None:
    (first, norm), (last, other) = run_threads(tied, 2, dtype)
    assert norm == other > 0
    for mine, its in zip(first, last, strict=True):
        assert torch.equal(mine, its)


def under_autocast(dtype: torch.dtype | None) -> tuple[dict[str, Any], float, float]:
    """Three steps with float32 parameters."""
    precision = None if dtype is None else HalfPrecision("autocast", dtype, {"initial_scale": 256.0})
    pipeline = blocks.build(torch.float32, autocast=None if precision is None else precision.autocast)
    optimizer: Optimizer = SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    if precision is not None:
        optimizer = precision.optimizer(pipeline, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        execute_pipeline(blocks.mine(step, torch.float32), pipeline)
        norm = clip_grad_norm_(pipeline, 0.5)
        optimizer.step()
    weights = {name: value.detach() for name, value in pipeline.named_parameters()}
    assert {value.dtype for value in weights.values()} == {torch.float32}
    return weights, norm.item(), float(pipeline.loss_scale)


@HALVES
def test_autocast_steps_the_parameters_themselves(dtype: torch.dtype) -> None:
    expected = run_threads(under_autocast, 4, None, data=2)
    for (weights, norm, scale), (wanted, wanted_norm, _) in zip(
        run_threads(under_autocast, 4, dtype, data=2), expected, strict=True
    ):
        assert scale == (256.0 if dtype == torch.float16 else 1.0)
        assert norm == pytest.approx(wanted_norm, rel=0.02)
        for name, value in weights.items():
            torch.testing.assert_close(value, wanted[name], rtol=0.02, atol=0.005)


def schedule_rates() -> tuple[list[float], list[float]]:
    """Of a scheduler on the wrapper, and on the optimizer within."""
    pipeline = blocks.build(torch.bfloat16)
    inner = SGD(pipeline.parameters(), lr=1.0)
    optimizer = MasterWeights(pipeline, inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    rates, within = [], []
    for step in range(4):
        execute_pipeline(blocks.mine(step, torch.bfloat16), pipeline)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        within.append(inner.param_groups[0]["lr"])
    return rates, within


def test_schedulers_work_on_the_wrapper() -> None:
    assert run_threads(schedule_rates, 1) == [([1.0, 0.5, 0.5, 0.25],) * 2]


def start_with_states() -> None:
    """Adagrad makes its sums when it is made; the masters take them over, in float32."""
    pipeline = blocks.build(torch.bfloat16)
    optimizer = MasterWeights(pipeline, torch.optim.Adagrad(pipeline.parameters(), initial_accumulator_value=0.1))
    assert {value["sum"].dtype for value in optimizer.state.values()} == {torch.float32}
    execute_pipeline(blocks.mine(0, torch.bfloat16), pipeline)
    optimizer.step()


def zero_views() -> None:
    """As torch leaves them where a gradient is a part of something larger."""
    pipeline = blocks.build(torch.bfloat16)
    optimizer = MasterWeights(pipeline, adamw(pipeline))
    for parameter in pipeline.parameters():
        parameter.grad = torch.ones(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and (p.grad == 0).all() for p in pipeline.parameters())


def load_other_weights() -> None:
    pipeline = blocks.build(torch.bfloat16)
    optimizer = MasterWeights(pipeline, adamw(pipeline))
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.fill_(0.5)
    execute_pipeline(blocks.mine(0, torch.bfloat16), pipeline)
    optimizer.step()
    assert all((parameter > 0.4).all() and (parameter < 0.6).all() for parameter in pipeline.parameters())


def save_and_load_without_the_optimizer(folder: Path) -> list[torch.Tensor]:
    """What was loaded is trained on, and saved again; a weight that was changed and put back keeps its master."""
    pipeline = blocks.build(torch.bfloat16)
    optimizer = MasterWeights(pipeline, adamw(pipeline))
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.fill_(7)
    save_checkpoint(folder / "other", pipeline)
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.fill_(1)
    load_checkpoint(folder / "other", pipeline)
    assert all((state["master"] == 7).all() for state in optimizer.state_dict()["state"].values())
    execute_pipeline(blocks.mine(0, torch.bfloat16), pipeline)
    optimizer.step()
    assert all((parameter > 6.9).all() for parameter in pipeline.parameters())
    masters = [held.clone() for held in optimizer.stepped.values()]
    with torch.no_grad():
        for parameter in pipeline.parameters():
            before = parameter.clone()
            parameter.zero_()
            parameter.copy_(before)
    optimizer.state_dict()
    for held, before in zip(optimizer.stepped.values(), masters, strict=True):
        assert torch.equal(held, before)
    return masters


def test_weights_that_are_loaded_without_the_optimizer_are_its_masters(tmp_path: Path) -> None:
    run_threads(save_and_load_without_the_optimizer, 1, tmp_path)


def misuse() -> None:
    pipeline = blocks.build(torch.bfloat16)
    with pytest.raises(UsageError, match=r"make it from model\.parameters"):
        MasterWeights(pipeline, AdamW([torch.nn.Parameter(torch.zeros(2))]))
    optimizer = MasterWeights(pipeline, adamw(pipeline))
    with pytest.raises(UsageError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UsageError, match="before wrapping the optimizer"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    execute_pipeline(blocks.mine(0, torch.bfloat16), pipeline)
    with pytest.raises(UsageError, match="max_norm must be positive"):
        clip_grad_norm_(pipeline, 0.0)


def refuse_other_parameters() -> None:
    for precision, dtype in (
        (HalfPrecision("parameters"), torch.float32),
        (HalfPrecision("autocast"), torch.float16),
    ):
        pipeline = blocks.build(dtype)
        with pytest.raises(UsageError, match=f"but the model's are in {dtype}: convert the model"):
            precision.optimizer(pipeline, adamw(pipeline))


@pytest.mark.parametrize(
    "check",
    [start_with_states, zero_views, load_other_weights, misuse, refuse_other_parameters],
    ids=lambda check: check.__name__,
)
def test_one_rank(check: Any) -> None:
    run_threads(check, 1)


def test_another_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="must be 'parameters' or 'autocast', got 'apex'"):
        HalfPrecision("apex")  # type: ignore[arg-type]  # what is refused


def probe_a_device_without() -> None:
    pipeline = blocks.build(torch.float16)
    with pytest.raises(UsageError, match=r"device 'cpu' cannot compute in torch.float16 \(.*not implemented.*\)"):
        HalfPrecision("parameters").optimizer(pipeline, adamw(pipeline))


def test_a_device_that_lacks_the_dtype_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("\"LayerNormKernelImpl\" not implemented for 'Half'")

    monkeypatch.setattr(functional, "layer_norm", refuse)
    run_threads(probe_a_device_without, 1)
