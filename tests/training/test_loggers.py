"""Loggers get the metrics of rank 0, whatever they are; TensorBoard's file has them, and the timeline of a step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import UsageError, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import Engine, Hook, LoggerHook, RateHook, Step, TensorBoardHook, Trainer
from tests.runtime.work import build

MODEL = PlainModel()
BATCHES = [MODEL.batch(4, seed=seed) for seed in range(3)]


def make_engine() -> Engine:
    pipeline = build(MODEL, make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2))
    return Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.5))


class Kept:
    """A logger as a user would write it."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.pictures: list[tuple[str, tuple[int, ...], int]] = []
        self.closed = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(values)))

    def picture(self, name: str, image: Tensor, step: int) -> None:
        assert image.dtype is torch.uint8
        self.pictures.append((name, tuple(image.shape), step))

    def close(self) -> None:
        self.closed += 1


class Losses(Hook):
    """Keeps the losses."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.epochs: list[tuple[float, float]] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(trainer.step_metrics["loss"])

    def after_epoch(self, trainer: Trainer) -> None:
        self.epochs.append((trainer.metrics["train"]["loss"], trainer.metrics["test"]["loss"]))


def kept(every: int, picture_every: int) -> tuple[Kept, Losses]:
    logger, losses = Kept(), Losses()
    hook = LoggerHook(logger, every=every, picture_every=picture_every)
    Trainer(make_engine(), [RateHook(), losses, hook]).fit(BATCHES, 2, test_loader=BATCHES[:1])
    return logger, losses


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {}), (4, {"data": 2})])
def test_a_logger_of_ones_own(ranks: int, layout: dict[str, Any]) -> None:
    [(logger, losses), *others] = run_threads(kept, ranks, 2, 0, **layout)
    steps = {step: values for step, values in logger.logged if "step/loss" in values}
    assert steps == {step: {"step/loss": losses.steps[step - 1], "step/learning rate": 0.5} for step in (2, 4, 6)}
    train = [(step, values["train/loss"]) for step, values in logger.logged if "train/loss" in values]
    assert train == [(3, losses.epochs[0][0]), (6, losses.epochs[1][0])]
    test = [(step, values) for step, values in logger.logged if "test/loss" in values]
    assert test == [(3, {"test/loss": losses.epochs[0][1]}), (6, {"test/loss": losses.epochs[1][1]})]
    assert (logger.closed, logger.pictures) == (1, [])
    assert all((other.logged, other.closed) == ([], 0) for other, _ in others)


def test_pictures_of_steps() -> None:
    (logger, _), (other, _) = run_threads(kept, 2, 1, 3)
    lanes = 2 * 24 + 8
    size = (2 * lanes + 16, 1000, 3)
    assert logger.pictures == [("timeline, planned and measured", size, step) for step in (2, 5)]
    assert other.pictures == []


def test_a_logger_is_closed_after_an_error() -> None:
    class Fails(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            raise ValueError("mine")

    def run() -> Kept:
        logger = Kept()
        with pytest.raises(ValueError, match="mine"):
            Trainer(make_engine(), [Fails(), LoggerHook(logger)]).fit(BATCHES, 1)
        return logger

    assert [logger.closed for logger in run_threads(run, 1)] == [1]


def into_tensorboard(folder: Path) -> Losses:
    losses = Losses()
    hook = TensorBoardHook(folder, every=1, picture_every=4)
    trainer = Trainer(make_engine(), [losses, hook])
    trainer.fit(BATCHES, 2, test_loader=BATCHES[:1])
    trainer.fit(BATCHES, 3, test_loader=BATCHES[:1])
    return losses


@pytest.mark.parametrize("ranks", [1, 3])
def test_tensorboards_file_is_read_back(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    losses = run_threads(into_tensorboard, ranks, tmp_path / "runs")[0]
    assert len(list((tmp_path / "runs").iterdir())) == 2  # one for each fit, and none of other ranks
    events = EventMultiplexer({"run": str(tmp_path / "runs")}, size_guidance={"images": 10}).Reload()
    steps = events.Scalars("run", "step/loss")
    assert [(event.step, event.value) for event in steps] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses.steps, start=1)
    ]
    for place, name in enumerate(("train/loss", "test/loss")):
        assert [(event.step, event.value) for event in events.Scalars("run", name)] == [
            (3 * epoch, pytest.approx(both[place], rel=1e-6)) for epoch, both in enumerate(losses.epochs, start=1)
        ]
    images = events.Images("run", "timeline, planned and measured")
    assert [image.step for image in images] == [2, 6]
    assert all(image.encoded_image_string.startswith(b"\x89PNG") and image.width == 1000 for image in images)


class Wandb(ModuleType):
    """Stands for wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(self, **options: Any) -> Wandb:
        self.calls.append(("init", options))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append((step, values))

    def Image(self, array: Any) -> tuple[str, tuple[int, ...]]:  # noqa: N802  # wandb's name
        return "image", array.shape

    def finish(self) -> None:
        self.calls.append("finish")


class MLflow(ModuleType):
    """Stands for mlflow."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[Any] = []

    def start_run(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, metrics))

    def end_run(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("library", [Wandb(), MLflow()], ids=["wandb", "mlflow"])
def test_loggers_by_name(library: Wandb | MLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    name = library.__name__
    monkeypatch.setitem(sys.modules, name, library)
    library.calls.clear()

    losses = run_threads(run_without_test, 2, name)[0]
    assert library.calls[0] == ("init", {"project": "mine"})
    assert library.calls[-1] == "finish"
    metrics = [call for call in library.calls[1:-1] if any(key.endswith("loss") for key in call[1])]
    assert metrics == [(step, {"step/loss": loss}) for step, loss in enumerate(losses[:3], start=1)] + [
        (3, {"train/loss": losses[3]})
    ]
    pictures = [call for call in library.calls[1:-1] if call not in metrics]
    image = ("image", (2 * 56 + 16, 1000, 3))
    assert pictures == ([(2, {"timeline, planned and measured": image})] if name == "wandb" else [])


def run_without_test(name: str) -> list[float]:
    losses: list[float] = []

    class Each(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            losses.append(trainer.step_metrics["loss"])

        def after_training(self, trainer: Trainer) -> None:
            losses.append(trainer.metrics["train"]["loss"])

    Trainer(make_engine(), [Each(), LoggerHook(name, picture_every=9, project="mine")]).fit(BATCHES, 1)
    return losses


@pytest.mark.parametrize(
    ("name", "module", "told"),
    [
        ("wandb", "wandb", "pip install wandb"),
        ("mlflow", "mlflow", "pip install mlflow"),
        ("tensorboard", "torch.utils.tensorboard", r"pip install 'pipeflow-torch\[tensorboard\]'"),
    ],
)
def test_what_is_not_installed_is_told_at_once(
    name: str, module: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"{name} is not installed .*: {told}"):
        LoggerHook(name)
    if name == "tensorboard":
        with pytest.raises(UsageError, match="is not installed"):
            TensorBoardHook("runs")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoggerHook("tensorbord"), "did you mean 'tensorboard'"),
        (lambda: LoggerHook(print), r"has no log\(\)"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: LoggerHook(Kept(), project="mine"), "project: options are only for loggers that are given by name"),
        (lambda: LoggerHook(Kept(), every=0), "every must be an integer of at least 1"),
        (lambda: LoggerHook(Kept(), picture_every=-1), "picture_every must be an integer of at least 0"),
    ],
    ids=["name", "object", "options", "every", "pictures"],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
