"""A run that stops and is continued: what it trains, how it is interrupted, and what is compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeflow import get_dataloader, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.step import Output
from pipeflow.optim import LossScaler, MasterWeights, Zero
from pipeflow.testing.models import PlainModel
from pipeflow.training import AccuracyHook, CheckpointHook, Engine, Hook, RateHook, Step, Trainer
from tests.runtime.work import build

MODEL = PlainModel()
SAMPLES = 24


class Samples(Dataset[Any]):
    """Notes which of its samples were read."""

    def __init__(self, count: int = SAMPLES, seed: int = 0, *, is_half: bool = False) -> None:
        self.inputs, self.labels = MODEL.batch(count, seed=seed)
        if is_half:
            self.inputs, self.labels = self.inputs.half(), self.labels.half()
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.inputs[index], self.labels[index]


class KilledError(Exception):
    """A process ends; what it had in memory is lost."""


class Kill(Hook):
    """Raises at the `moment`-th call of any hook's moment, before or after other hooks."""

    def __init__(self, moment: int, priority: int) -> None:
        self.left = moment
        self.priority = priority

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KilledError

    def before_fit(self, trainer: Trainer) -> None:
        self.tick()

    def before_epoch(self, trainer: Trainer) -> None:
        self.tick()

    def before_step(self, trainer: Trainer) -> None:
        self.tick()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.tick()

    def after_training(self, trainer: Trainer) -> None:
        self.tick()

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        self.tick()

    def after_evaluation(self, trainer: Trainer) -> None:
        self.tick()

    def after_epoch(self, trainer: Trainer) -> None:
        self.tick()

    def after_fit(self, trainer: Trainer) -> None:
        self.tick()


class Notes(Hook):
    """The mean losses of all epochs, in checkpoints."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = list(state_dict["losses"])

    def after_epoch(self, trainer: Trainer) -> None:
        self.losses += [trainer.metrics["train"]["loss"], trainer.metrics["test"]["loss"]]


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs[:, 0, 0].sign() == labels[:, 0, 0].sign()).sum()


def make_trainer(
    checkpoints: CheckpointHook | None, hooks: Iterable[Hook] = (), accumulation: int = 1, *, is_half: bool = False
) -> Trainer:
    """With `is_half` a model of 16 bits, whose gradients overflow now and then."""
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    pipeline = build(PlainModel(dtype=torch.float16) if is_half else MODEL, schedule)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.05)
    by_step = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    if is_half:
        scaler = LossScaler(initial_scale=2.0**15, growth_interval=2, hysteresis=1)
        optimizer = MasterWeights(pipeline, Zero(pipeline, optimizer), scaler=scaler)
    engine = Engine(
        pipeline,
        optimizer,
        scheduler=by_step,
        gradient_accumulation=accumulation,
        clip_grad_norm=1.0,
        non_finite="skip",
    )
    own = [Notes(), RateHook(by_epoch), AccuracyHook(right), *([] if checkpoints is None else [checkpoints])]
    return Trainer(engine, [*own, *hooks])


def loaders(size: int = 4, dataset: Samples | None = None, *, is_half: bool = False) -> dict[str, Any]:
    """Of `size` samples of all replicas."""
    each = size // current_context().data_size
    train = get_dataloader(Samples(is_half=is_half) if dataset is None else dataset, each, shuffle=True)
    return {"loader": train, "test_loader": get_dataloader(Samples(8, 1, is_half=is_half), 2, shuffle=True)}


def result(trainer: Trainer) -> dict[str, Any]:
    """All that two runs should have alike."""
    named = trainer.engine.model.named_parameters()
    [notes] = (hook for hook in trainer.hooks if isinstance(hook, Notes))
    return {
        "weights": {name.split(".", 2)[2]: parameter.detach().numpy().copy() for name, parameter in named},
        "metrics": trainer.metrics,
        "losses": notes.losses,
        "counts": (trainer.epoch, trainer.engine.steps, trainer.engine.skipped),
        "rate": trainer.engine.optimizer.param_groups[0]["lr"],
        "scale": trainer.engine.model.loss_scale,
    }


def undisturbed(epochs: int, size: int, accumulation: int, max_steps: int | None = None) -> dict[str, Any]:
    """What a run has at its end that nothing happens to."""
    trainer = make_trainer(None, accumulation=accumulation)
    trainer.fit(epochs=epochs, max_steps=max_steps, **loaders(size))
    return result(trainer)


def require_same(mine: dict[str, Any], its: dict[str, Any]) -> None:
    """Bit for bit."""
    assert mine["weights"].keys() == its["weights"].keys()
    for name, weight in mine["weights"].items():
        assert numpy.array_equal(weight, its["weights"][name]), name
    assert {key: value for key, value in mine.items() if key != "weights"} == {
        key: value for key, value in its.items() if key != "weights"
    }


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result, with the weights of all ranks."""
    return {**results[0], "weights": {name: each for one in results for name, each in one["weights"].items()}}
