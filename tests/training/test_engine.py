"""An Engine's steps are those of a plain loop, whatever is accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import LossScaler, MasterWeights, Pipeline, PipelineError, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel
from pipeflow.training import Engine, NonFiniteGradientError, NonFiniteLossError
from tests.runtime.work import build

NORM = 0.05


def batches(model: TinyModel, count: int, part: int = 0, parts: int = 1) -> Iterator[Any]:
    """So many batches, of each this replica's part of 8 samples."""
    for seed in range(count):
        inputs, labels = model.batch(8, seed=seed)
        yield inputs.tensor_split(parts)[part], labels.tensor_split(parts)[part]


def make_engine(model: TinyModel, **options: Any) -> Engine:
    context = current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=2)
    pipeline = build(model, schedule)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return Engine(pipeline, optimizer, scheduler=scheduler, **options)


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """This rank's, by their name in the whole model."""
    return {name.split(".", 2)[2]: weight.detach() for name, weight in engine.model.named_parameters()}


def steps_of(engine: Engine, data: Iterator[Any]) -> None:
    """Two steps, in one call each."""
    accumulated = engine.gradient_accumulation
    for _ in range(2):
        step = engine.train_step(data)
        assert (step.is_taken, len(step.batches), step.samples) == (True, accumulated, 8 * accumulated)
        assert step.grad_norm is not None
        assert step.grad_norm > NORM


def pieces_of(engine: Engine, data: Iterator[Any]) -> None:
    """Two steps, a batch a call."""
    accumulated, taken = engine.gradient_accumulation, []
    for _ in range(2 * accumulated):
        engine.zero_grad()
        engine.execute(data)
        taken.append(engine.step())
    assert taken == [*[False] * (accumulated - 1), True] * 2


def backwards_of(engine: Engine, data: Iterator[Any], model: TinyModel) -> None:
    """Two steps whose forwards the caller runs."""
    [chunk] = engine.model.chunks
    for inputs, labels in data:
        engine.zero_grad()
        engine.backward(model.criterion(chunk(inputs), labels))
        engine.step()


def trained(model: TinyModel, accumulation: int, run: Any) -> dict[str, Tensor]:
    """The weights of this rank after two steps."""
    engine = make_engine(model, gradient_accumulation=accumulation, clip_grad_norm=NORM)
    context = current_context()
    run(engine, batches(model, 2 * accumulation, context.data_rank, context.data_size))
    assert engine.steps == 2
    assert engine.optimizer.param_groups[0]["lr"] == 0.125
    return weights_of(engine)


def trained_by_hand(model: TinyModel, accumulation: int) -> dict[str, Tensor]:
    """The weights of the model in one piece, which sees the batches of a step as one."""
    module = model.stage(0, model.layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    data = batches(model, 2 * accumulation)
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.5 ** (step + 1)
        inputs, labels = zip(*(next(data) for _ in range(accumulation)), strict=True)
        optimizer.zero_grad()
        model.criterion(module(torch.cat(inputs)), torch.cat(labels)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), NORM)
        optimizer.step()
    return dict(module.named_parameters())


@pytest.mark.some(8)
@pytest.mark.parametrize("model", [PlainModel(layers=4), TiedModel(layers=4)], ids=["plain", "tied"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("ranks", "data"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("run", [steps_of, pieces_of], ids=["whole", "pieces"])
def test_steps_are_those_of_a_plain_loop(model: TinyModel, accumulation: int, ranks: int, data: int, run: Any) -> None:
    expected = trained_by_hand(model, accumulation)
    for weights in run_threads(trained, ranks, model, accumulation, run, data=data):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("data", [1, 2])
def test_a_backward_by_hand(accumulation: int, data: int) -> None:
    model = PlainModel(layers=4)
    expected = trained_by_hand(model, accumulation)
    for weights in run_threads(trained, data, model, accumulation, partial(backwards_of, model=model), data=data):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-12)


def by_hand_in_a_pipeline() -> str:
    engine = make_engine(PlainModel())
    with pytest.raises((UsageError, PipelineError)) as raised:
        engine.backward(torch.ones((), requires_grad=True))
    return str(raised.value)


def test_a_backward_by_hand_needs_the_whole_model() -> None:
    assert all("train it with execute_pipeline" in message for message in run_threads(by_hand_in_a_pipeline, 2))


def unlike_scales() -> str:
    engine = make_engine(PlainModel())
    scale = 1.0 if current_context().rank == 0 else 0.5
    with pytest.raises((UsageError, PipelineError)) as raised:
        execute_pipeline(batches(PlainModel(), 1), engine.model, gradient_scale=scale)
    return str(raised.value)


def test_all_ranks_have_the_same_scale() -> None:
    assert all("gradient_scale=0.5, but rank 0 1" in message for message in run_threads(unlike_scales, 2))


def poisoned(model: TinyModel, count: int, batch: int) -> Iterator[Any]:
    """Batches whose last sample has no number in one of them."""
    for index, (inputs, labels) in enumerate(batches(model, count)):
        if index == batch:
            inputs[-1] = torch.nan
        yield inputs, labels


def skipping(accumulation: int) -> tuple[list[bool], dict[str, Tensor], int]:
    model = PlainModel()
    engine = make_engine(model, gradient_accumulation=accumulation, non_finite="skip")
    data = poisoned(model, 3 * accumulation, accumulation)  # the first batch of the second step
    taken = [engine.train_step(data).is_taken for _ in range(3)]
    return taken, weights_of(engine), engine.skipped


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_without_a_finite_loss_can_be_skipped(accumulation: int) -> None:
    for taken, weights, skipped in run_threads(skipping, 2, accumulation):
        assert taken == [True, False, True]
        assert skipped == 1
        assert all(bool(weight.isfinite().all()) for weight in weights.values())


def stopping() -> tuple[int, int | None, str, bool]:
    model = PlainModel()
    engine = make_engine(model, gradient_accumulation=2)
    data = poisoned(model, 6, 2)
    engine.train_step(data)
    before = {name: weight.clone() for name, weight in weights_of(engine).items()}
    with pytest.raises(NonFiniteLossError) as raised:
        engine.train_step(data)
    same = all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())
    assert engine.train_step(data).is_taken  # one that went wrong left nothing behind
    return raised.value.step, raised.value.microbatch, str(raised.value), same


def test_a_loss_that_is_not_finite_is_named_on_every_rank() -> None:
    for step, microbatch, message, same in run_threads(stopping, 2):
        assert (step, microbatch, same) == (1, 1, True)
        assert "the loss is nan in step 1, first in microbatch 1" in message


def steep(output: Tensor, labels: Tensor) -> Tensor:
    """A finite loss whose derivative is infinite where an output meets its label."""
    return (output - labels).abs().sqrt().mean()


def overflowing(non_finite: Any, scaled: bool) -> tuple[str, bool, int, int]:
    """What a step with such a gradient tells, whether it left the weights as they were, and the counts after it."""
    model, context = PlainModel(), current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=2)
    pipeline = Pipeline(model.chunks(schedule, context.pipeline_rank), schedule, criterion=steep)
    optimizer: Any = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    if scaled:
        optimizer = MasterWeights(pipeline, optimizer, scaler=LossScaler())
    engine = Engine(pipeline, optimizer, clip_grad_norm=NORM, non_finite=non_finite)
    before = {name: weight.clone() for name, weight in weights_of(engine).items()}
    inputs, labels = model.batch(8)
    right = (inputs, model.stage(0, model.layers)(inputs).detach())
    try:
        told = f"taken: {engine.train_step(iter([right])).is_taken}"
    except NonFiniteGradientError as error:
        told = str(error)
    same = all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())
    assert engine.train_step(iter([(inputs, labels)])).is_taken
    return told, same, engine.steps, engine.skipped


@pytest.mark.parametrize(
    ("non_finite", "scaled", "told", "counts"),
    [
        ("stop", False, "the gradient is not finite in step 0", (1, 0)),
        ("skip", False, "taken: False", (2, 1)),
        ("stop", True, "taken: False", (2, 0)),
    ],
)
def test_a_gradient_that_is_not_finite_changes_no_weight(
    non_finite: str, scaled: bool, told: str, counts: tuple[int, int]
) -> None:
    for message, same, *counted in run_threads(overflowing, 2, non_finite, scaled):
        assert told in message
        assert same
        assert tuple(counted) == counts


def interrupted(by_hand: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after a step that begins again because its second batch was wrong; and after one that does not."""
    model, made = PlainModel(), []
    for wrong in (True, False):
        engine = make_engine(model, gradient_accumulation=2)
        engine.train_step(batches(model, 2))
        if wrong:
            engine.zero_grad()
            engine.execute(batches(model, 1))
            run: Any = partial(engine.backward, torch.ones(())) if by_hand else partial(engine.execute, iter([]))
            with pytest.raises((UsageError, PipelineError)):
                run()
        assert engine.train_step(batches(model, 2)).is_taken
        made.append({name: weight.clone() for name, weight in weights_of(engine).items()})
    return made[0], made[1]


@pytest.mark.parametrize(("ranks", "by_hand"), [(2, False), (1, True)])
def test_after_an_error_a_step_starts_again(ranks: int, by_hand: bool) -> None:
    for after, expected in run_threads(interrupted, ranks, by_hand):
        assert all(torch.equal(weight, expected[name]) for name, weight in after.items())


def refused() -> list[str]:
    model = PlainModel()
    engine, messages = make_engine(model), []
    with pytest.raises(UsageError, match="gradient_scale must be a finite number, got nan"):
        execute_pipeline(batches(model, 1), engine.model, gradient_scale=float("nan"))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for options in (
        {"model": nn.Linear(1, 1)},
        {"optimizer": "adam"},
        {"optimizer": other},
        {"optimizer": torch.optim.LBFGS(engine.model.parameters())},
        {"gradient_accumulation": 0},
        {"clip_grad_norm": -1.0},
        {"non_finite": "forget"},
    ):
        with pytest.raises(UsageError) as raised:
            Engine(**{"model": engine.model, "optimizer": engine.optimizer, **options})  # type: ignore[arg-type]  # wrong on purpose
        messages.append(str(raised.value))
    with pytest.raises(UsageError) as raised:
        engine.step()
    messages.append(str(raised.value))
    data = batches(model, 2)
    engine.execute(data)
    with pytest.raises(UsageError) as raised:
        engine.execute(data)
    return [*messages, str(raised.value)]


def test_what_cannot_work_is_refused() -> None:
    [messages] = run_threads(refused, 1)
    wanted = (
        *("a pipeflow.Pipeline", "a torch.optim.Optimizer", "parameters that are not in the model"),
        *("LBFGS.step needs a closure", "at least 1", "0 for no clipping", "'stop', 'skip' or 'ignore'"),
        *("run a batch first", "call step() after each of them"),
    )
    for message, part in zip(messages, wanted, strict=True):
        assert part in message
