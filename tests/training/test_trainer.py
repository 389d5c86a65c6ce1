"""A Trainer takes the steps of a plain loop, calls its hooks in order, and evaluates over all replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pipeflow import UsageError, get_dataloader, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import gather_rows
from pipeflow.engine.runtime.step import Output
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import AccuracyHook, Engine, Hook, MetricHook, RateHook, Step, Trainer
from tests.runtime.work import build

MODEL = PlainModel()


def samples(count: int, seed: int = 0) -> TensorDataset:
    """A data set."""
    return TensorDataset(*MODEL.batch(count, seed=seed))


def make_engine(**options: Any) -> Engine:
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    pipeline = build(MODEL, schedule)
    return Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1), **options)


class Recorder(Hook):
    """Notes what it is called for."""

    def __init__(self, calls: list[str], name: str = "", priority: int = 50) -> None:
        self.calls = calls
        self.name = name
        self.priority = priority

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Hook) and callable(getattr(Hook, name)):
            return lambda trainer, *others: self.calls.append(
                f"{self.name}{name} {trainer.epoch} {trainer.engine.steps}"
            )
        return super().__getattribute__(name)


def order_of_calls() -> list[str]:
    calls: list[str] = []
    loader, test = get_dataloader(samples(8), 4), get_dataloader(samples(4), 2)
    Trainer(make_engine(), [Recorder(calls)]).fit(loader, 2, test_loader=test, test_interval=2)
    return calls


def test_hooks_are_called_in_order() -> None:
    steps = "before_step 0 0|after_step 0 1|before_step 0 1|after_step 0 2"
    more = "before_step 1 2|after_step 1 3|before_step 1 3|after_step 1 4"
    tested = "before_evaluation 1 4|after_batch 1 4|after_batch 1 4|after_evaluation 1 4"
    expected = (
        f"before_fit 0 0|before_epoch 0 0|{steps}|after_training 0 2|after_epoch 1 2|"
        f"before_epoch 1 2|{more}|after_training 1 4|{tested}|after_epoch 2 4|after_fit 2 4|close 2 4"
    )
    for calls in run_threads(order_of_calls, 2):
        assert "|".join(calls) == expected


def in_priority() -> list[str]:
    calls: list[str] = []
    hooks = [Recorder(calls, "b ", 2), Recorder(calls, "c ", 2), Recorder(calls, "a ", 1)]
    Trainer(make_engine(), hooks).fit([MODEL.batch(4)], 1)
    return [call.split()[0] for call in calls[:3]]


def test_hooks_have_priorities() -> None:
    assert run_threads(in_priority, 1) == [["a", "b", "c"]]


def fitted(ranks_see_outputs: list[int]) -> dict[str, Any]:
    """Two epochs of 5 batches, 2 a step; then an evaluation."""
    context = current_context()
    engine = make_engine(gradient_accumulation=2)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    losses: list[float] = []

    class Losses(Hook):
        needs_outputs = frozenset({"train", "test"})

        def after_step(self, trainer: Trainer, step: Step) -> None:
            losses.append(float(step.loss))
            assert (step.batches[0].outputs is not None) == (context.pipeline_rank in ranks_see_outputs)

        def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
            assert (output.outputs is not None) == (context.pipeline_rank in ranks_see_outputs)
            assert labels is not None

    hooks = [Losses(), RateHook(scheduler), AccuracyHook(right), MetricHook("distance", Distance())]
    trainer = Trainer(engine, hooks)
    loader = get_dataloader(samples(20), 4 // context.data_size, shuffle=True)
    trainer.fit(loader, 2, test_loader=get_dataloader(samples(6, 1), 2))
    assert trainer.epoch == 2
    assert engine.steps == 4
    test = trainer.evaluate(get_dataloader(samples(6, 1), 2))
    return {"losses": losses, "test": dict(test), "train": dict(trainer.metrics["train"])}


def test_the_rate_is_that_of_the_first_rank_everywhere() -> None:
    """With a rate for each layer, ranks have other groups."""

    def rank() -> list[float]:
        engine, rates = make_engine(), []
        first = 0.1 / (1 + current_context().pipeline_rank)
        engine.optimizer.param_groups[0]["lr"] = first
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)

        class Rates(Hook):
            priority = 90

            def after_step(self, trainer: Trainer, step: Step) -> None:
                rates.append(trainer.step_metrics["learning rate"])

        Trainer(engine, [RateHook(scheduler), Rates()]).fit(get_dataloader(samples(8), 4), 2)
        return rates

    first, second = run_threads(rank, 2)
    assert first == second == [0.1, 0.1, 0.05, 0.05]


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    """How many sequences begin with the right sign."""
    return (outputs[:, 0, 0].sign() == labels[:, 0, 0].sign()).sum()


class Distance:
    """A metric as torchmetrics has them, whose replicas tell each other what they counted."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.parts: list[Tensor] = []

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.parts.append((outputs - labels).square().mean(dim=(1, 2)))

    def compute(self) -> Tensor:
        return torch.cat(gather_rows(current_context().data, torch.cat(self.parts))).mean()


@pytest.mark.parametrize(("ranks", "data"), [(2, 1), (4, 2)])
def test_layouts_see_the_same(ranks: int, data: int) -> None:
    [alone] = run_threads(fitted, 1, [0])
    assert len(alone["losses"]) == 4
    assert set(alone["test"]) == {"loss", "accuracy", "distance"}
    assert abs(alone["test"]["loss"] - alone["test"]["distance"]) < 1e-12
    assert alone["train"]["learning rate"] == 0.05
    assert abs(alone["train"]["loss"] - sum(alone["losses"][2:]) / 2) < 1e-12
    for other in run_threads(fitted, ranks, [1], data=data):
        assert other["test"] == pytest.approx(alone["test"], abs=1e-12)
        if data == 1:  # replicas deal the samples into other batches
            assert other == {key: pytest.approx(value, abs=1e-12) for key, value in alone.items()}


def first_word(labels: Tensor) -> float:
    """A weight that differs from sample to sample: how many labels of its first word are positive, and one more."""
    return 1.0 + float((labels[:, 0] > 0).sum())


def weighed() -> tuple[float, float, list[float]]:
    """The loss of an evaluation, that of an epoch in which one step is skipped, and those of its steps."""
    context = current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=2)
    pipeline = build(MODEL, schedule, weigh=first_word)
    engine = Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.0), non_finite="skip")
    steps: list[float] = []

    class Losses(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            steps.append(float(step.loss))

    trainer = Trainer(engine, [Losses()])
    batches = [
        tuple(part.tensor_split(context.data_size)[context.data_rank] for part in MODEL.batch(4 * size, seed=size))
        for size in (1, 2, 3)
    ]
    tested = trainer.evaluate(batches)["loss"]
    inputs, labels = batches[1]
    trainer.fit([batches[0], (inputs * torch.nan, labels), batches[2]], 1)
    return tested, trainer.metrics["train"]["loss"], steps


@pytest.mark.parametrize(("ranks", "data"), [(1, 1), (2, 1), (4, 2)])
def test_losses_of_batches_are_weighed_and_skipped_steps_left_out(ranks: int, data: int) -> None:
    module = MODEL.stage(0, MODEL.layers)
    losses, weights = [], []
    for size in (1, 2, 3):
        microbatches = [part.tensor_split(2 * data) for part in MODEL.batch(4 * size, seed=size)]
        each = [(MODEL.criterion(module(i), o).item(), first_word(o)) for i, o in zip(*microbatches, strict=True)]
        weights.append(sum(weight for _, weight in each))
        losses.append(sum(loss * weight for loss, weight in each) / weights[-1])
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    trained = (losses[0] * weights[0] + losses[2] * weights[2]) / (weights[0] + weights[2])
    for tested, epoch, steps in run_threads(weighed, ranks, data=data):
        assert tested == pytest.approx(total, rel=1e-12)
        assert epoch == pytest.approx(trained, rel=1e-12)
        assert steps[1] != steps[1]
        assert [steps[0], steps[2]] == pytest.approx([losses[0], losses[2]], rel=1e-12)


def stopped() -> tuple[int, int, int]:
    class Stop(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            trainer.should_stop = trainer.engine.steps == 3

    trainer = Trainer(make_engine(), [Stop()])
    batches = [MODEL.batch(4)] * 2
    trainer.fit(batches, 5)
    other = Trainer(make_engine())
    other.fit(batches, 5, max_steps=4)
    return trainer.engine.steps, other.engine.steps, other.epoch


def test_training_can_end_early() -> None:
    assert run_threads(stopped, 1) == [(3, 4, 2)]


def predicted() -> tuple[bool, Any, bool]:
    engine = make_engine()
    inputs, _ = MODEL.batch(4)
    outputs = Trainer(engine).predict(inputs)
    return engine.model.training, outputs, current_context().pipeline_rank == 1


def test_predictions_are_on_the_last_stage() -> None:
    expected = MODEL.stage(0, MODEL.layers)(MODEL.batch(4)[0])
    for training, outputs, is_last in run_threads(predicted, 2):
        assert training
        if is_last:
            torch.testing.assert_close(outputs, expected.detach())
        else:
            assert outputs is None


def close_after_error() -> list[str]:
    calls: list[str] = []

    class Fails(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError):
        Trainer(make_engine(), [Recorder(calls), Fails()]).fit([MODEL.batch(4)], 1)
    return calls


def test_hooks_are_closed_after_an_error() -> None:
    [calls] = run_threads(close_after_error, 1)
    assert calls[-1] == "close 0 1"


def refused() -> list[str]:
    engine, messages, batch = make_engine(), [], MODEL.batch(4)
    for attempt in (
        lambda: Trainer("engine"),  # type: ignore[arg-type]  # wrong on purpose
        lambda: Trainer(engine, [AccuracyHook]),  # type: ignore[list-item]  # wrong on purpose
        lambda: Trainer(engine, [print]),  # type: ignore[list-item]  # wrong on purpose
        lambda: Trainer(engine).fit([], 1),
        lambda: Trainer(engine).fit(iter([batch]), 1),
        lambda: Trainer(make_engine(gradient_accumulation=2)).fit([batch], 1),
        lambda: Trainer(engine).fit([batch], 1, test_loader=[]),
        lambda: Trainer(engine).fit([batch], 1, test_loader=[batch], test_interval=0),
        lambda: Trainer(engine, [AccuracyHook()]).fit([batch], 1, return_outputs=False),
        lambda: MetricHook("accuracy", right),
    ):
        with pytest.raises(UsageError) as raised:
            attempt()
        messages.append(str(raised.value))
    return messages


def test_what_cannot_work_is_refused() -> None:
    [messages] = run_threads(refused, 1)
    wanted = (
        *("needs a pipeflow.training.Engine", "as in AccuracyHook()", "derive its class", "loader has no batch"),
        *(
            "has no length",
            "1 batches, and a step takes gradient_accumulation=2",
            "test_loader has no batch",
            "at least 1",
            "AccuracyHook needs the outputs",
            "no update()",
        ),
    )
    for message, part in zip(messages, wanted, strict=True):
        assert part in message


def test_an_answer_is_right_if_its_label_has_the_largest_score() -> None:
    scores = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 1.0], [0.0, 0.5, 0.7], [0.2, 0.1, 0.0]])
    assert AccuracyHook().count_right(scores, torch.tensor([1, 0, 1, 0])) == 3
