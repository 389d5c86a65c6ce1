"""ColossalAI's Trainer and its hooks: pipeflow's, told of batches in ColossalAI's order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import UsageError, get_dataloader
from pipeflow.colossalai import initialize
from pipeflow.colossalai.nn.metric import Accuracy
from pipeflow.colossalai.trainer import Trainer, hooks
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.training import MultiTimer, read_config
from pipeflow.training.launch import keep_config
from tests.colossalai.work import MODEL, initialized, samples


class Recorder(hooks.BaseHook):
    """Notes what it is called for, in which epoch and after how many batches."""

    def __init__(self, calls: list[str], name: str = "", priority: int = 10) -> None:
        super().__init__(priority)
        self.calls = calls
        self.name = name

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("before_", "after_")) and name in vars(Recorder.__base__) and name not in NATIVE:
            return lambda trainer, *others: self.calls.append(
                f"{self.name}{name} {trainer.cur_epoch} {trainer.cur_step}"
            )
        return super().__getattribute__(name)


NATIVE = {
    *("before_fit", "before_epoch", "before_step", "after_step", "after_training"),
    *("before_evaluation", "after_batch", "after_evaluation", "after_fit"),
}


def order_of_calls(accumulation: int) -> list[str]:
    calls: list[str] = []
    loader, test = get_dataloader(samples(8), 4), get_dataloader(samples(4), 2)
    engine, loader, test, _ = initialized({"gradient_accumulation": accumulation}, loader, test_dataloader=test)
    trainer = Trainer(engine)
    trainer.fit(loader, 2, test_dataloader=test, test_interval=2, hooks=[Recorder(calls)])
    assert (trainer.cur_epoch, trainer.cur_step) == (2, 4)
    return calls


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hooks_are_called_in_order(accumulation: int) -> None:
    """For every batch, however many a step takes."""
    first = "before_train_iter 0 0|after_train_iter 0 0|before_train_iter 0 1|after_train_iter 0 1"
    second = "before_train_iter 1 2|after_train_iter 1 2|before_train_iter 1 3|after_train_iter 1 3"
    tested = "|".join(["before_test_iter 1 4|after_test_iter 1 4"] * 2)
    expected = (
        "after_hook_is_attached 0 0|before_train 0 0|"
        f"before_train_epoch 0 0|{first}|after_train_epoch 0 2|"
        f"before_train_epoch 1 2|{second}|after_train_epoch 1 4|"
        f"before_test 1 4|before_test_epoch 1 4|{tested}|after_test_epoch 1 4|after_test 1 4|after_train 2 4"
    )
    for calls in run_threads(order_of_calls, 2, accumulation):
        assert "|".join(calls) == expected


def in_priority() -> list[str]:
    calls: list[str] = []
    engine, *_ = initialized({})
    own = [Recorder(calls, "b ", 2), hooks.LossHook(), Recorder(calls, "c ", 2), Recorder(calls, "a ", 1)]
    Trainer(engine).fit([MODEL.batch(4)], 1, hooks=own)
    return [call.split()[0] for call in calls if "before_train " in call]


def test_hooks_have_priorities() -> None:
    assert run_threads(in_priority, 1) == [["a", "b", "c"]]


class Seen(hooks.BaseHook):
    """Keeps what it is told of batches, and what trainers tell each other."""

    def __init__(self) -> None:
        super().__init__(priority=30)
        self.train: list[tuple[Any, ...]] = []
        self.test: list[tuple[Any, ...]] = []

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self.init_runner_states(trainer, "mine", 7)
        self.init_runner_states(trainer, "mine", 8)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.train.append((output, label, loss))
        if loss is not None and trainer.engine.steps:
            assert trainer.states["step_metrics"]["Loss"] > 0

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.test.append((output, label, loss))


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    """How many sequences begin with the right sign."""
    return (outputs[:, 0, 0].sign() == labels[:, 0, 0].sign()).sum()


def fitted(accumulation: int, keeps: bool) -> dict[str, Any]:
    loader, test = get_dataloader(samples(8), 4), get_dataloader(samples(6, 1), 2)
    engine, loader, test, _ = initialized({"gradient_accumulation": accumulation}, loader, test_dataloader=test)
    rates = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    seen, timer = Seen(), MultiTimer()
    own = [seen, hooks.LRSchedulerHook(rates, by_epoch=True), *([hooks.AccuracyHook(right)] if keeps else [])]
    trainer = Trainer(engine=engine, timer=timer)
    trainer.fit(loader, 2, test_dataloader=test, hooks=own, return_output_label=keeps)
    is_last = current_context().pipeline_rank == 1
    for output, label, loss in seen.train + seen.test:
        assert (loss is not None) == is_last
        assert (output is not None) == (label is not None) == (is_last and keeps)
        if is_last and keeps:
            torch.testing.assert_close(loss, MODEL.criterion(output, label))
    assert [len(seen.train), len(seen.test)] == [4, 6]
    assert trainer.states["mine"] == 7
    assert [len(each.history) for _, each in timer] == [2, 4 // accumulation, 2, 6]
    assert {name for name, _ in timer} == {"Train-epoch", "Train-step", "Test-epoch", "Test-step"}
    return {when: dict(metrics) for when, metrics in trainer.states["metrics"].items()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hooks_see_batches_and_metrics(accumulation: int) -> None:
    first, last = run_threads(fitted, 2, accumulation, True)
    assert first == last
    assert set(first["train"]) == {"Loss", "LR"}
    assert set(first["test"]) == {"Loss", "Accuracy"}
    assert first["train"]["LR"] == 0.05


def test_outputs_are_kept_for_none() -> None:
    assert [set(each["test"]) for each in run_threads(fitted, 2, 1, False)] == [{"Loss"}] * 2


def others() -> None:
    engine, loader, *_ = initialized({"NUM_EPOCHS": 3, "gradient_accumulation": 2}, get_dataloader(samples(8), 2))
    trainer = Trainer(engine)
    trainer.fit(loader, max_steps=3)  # up to a whole step
    assert (trainer.cur_epoch, trainer.cur_step) == (1, 4)
    trainer.cur_epoch = 2
    trainer.fit(loader)
    assert (trainer.cur_epoch, trainer.cur_step) == (3, 8)
    trainer.evaluate(get_dataloader(samples(6), 2), hooks=[hooks.AccuracyHook(right)])
    assert trainer.states["metrics"]["test"].keys() == {"Loss", "Accuracy"}
    inputs, _ = MODEL.batch(4)
    outputs = trainer.predict(inputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs, engine(inputs))


def test_epochs_follow_from_the_configuration_and_the_rest_works() -> None:
    run_threads(others, 1)


def refused() -> None:
    engine, *_ = initialized({})
    batches = [MODEL.batch(4)]
    with pytest.raises(UsageError, match="AccuracyHook needs outputs, and return_output_label=False drops them"):
        Trainer(engine).fit(batches, 1, hooks=[hooks.AccuracyHook(Accuracy())], return_output_label=False)
    with pytest.raises(UsageError, match="set NUM_EPOCHS"):
        Trainer(engine).fit(batches)
    with pytest.raises(UsageError, match="the engine that initialize returned"):
        Trainer(engine.model)
    with pytest.raises(UsageError, match="a hook must be a Hook"):
        Trainer(engine).fit(batches, 1, hooks=[hooks.LossHook])  # type: ignore[list-item]  # a class, by mistake
    assert engine.steps == 0


def test_what_cannot_work_is_refused() -> None:
    run_threads(refused, 1)


def test_accuracy_counts() -> None:
    scores = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 5.0], [2.0, 2.5, 0.0]])
    assert int(Accuracy()(scores, torch.tensor([0, 1, 1]))) == 2


def checkpointed(folder: str) -> tuple[list[float], int]:
    """Two runs of one folder: the second goes on where the first ended."""
    losses: list[float] = []

    class Losses(hooks.BaseHook):
        def after_train_epoch(self, trainer: Trainer) -> None:
            losses.append(trainer.states["metrics"]["train"]["Loss"])

    steps = 0
    for epochs in (2, 4):
        engine, loader, *_ = initialized({}, get_dataloader(samples(8), 4, shuffle=True))
        own = [Losses(), hooks.SaveCheckpointHook(interval=1, checkpoint_dir=folder, model=engine.model)]
        Trainer(engine).fit(loader, epochs, hooks=own)
        steps = engine.steps
    return losses, steps


def test_checkpoints_have_all_of_it(tmp_path: Path) -> None:
    for losses, steps in run_threads(checkpointed, 2, str(tmp_path)):
        assert steps == 8
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == 4


def unlike_names(folder: str) -> int:
    """Two runs of a model whose stages have tensors of the same names."""
    keep_config(read_config({"NUM_MICRO_BATCHES": 2}))
    module = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())])
    inputs, step = torch.ones(4, 4), 0
    for epochs in (1, 2):
        engine, *_ = initialize(module, torch.optim.Adam(module.parameters()), torch.nn.MSELoss(), verbose=False)
        trainer = Trainer(engine)
        trainer.fit([(inputs, inputs)] * 3, epochs, hooks=[hooks.SaveCheckpointHook(checkpoint_dir=folder)])
        step = trainer.cur_step
    return step


def test_checkpoints_of_stages_that_name_their_tensors_alike(tmp_path: Path) -> None:
    assert run_threads(unlike_names, 2, str(tmp_path)) == [6, 6]


def logged(logger: Any) -> None:
    engine, loader, test, _ = initialized(
        {}, get_dataloader(samples(8), 4), test_dataloader=get_dataloader(samples(4), 2)
    )
    timer, rates = MultiTimer(), torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    own = [
        hooks.LossHook(),
        hooks.LogMetricByStepHook(),
        hooks.LogMetricByEpochHook(logger, interval=2),
        hooks.LogTimingByEpochHook(timer, logger, interval=2, ignore_num_train_steps=1),
        hooks.LogMemoryByEpochHook(logger, interval=2, log_eval=False),
        hooks.LRSchedulerHook(rates, by_epoch=True),
        hooks.ThroughputHook(ignored_steps=1, tflop_per_step=8.0),
    ]
    trainer = Trainer(engine, timer)
    trainer.fit(loader, 3, test_dataloader=test, hooks=own, return_output_label=False)
    metrics = trainer.states["metrics"]["train"]
    assert metrics["TFLOP/s"] == pytest.approx(metrics["Throughput"] * 2.0)


class Said:
    """A logger that keeps what rank 0 says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str, ranks: list[int]) -> None:
        assert ranks == [0]
        if current_context().rank == 0:
            self.lines.append(message)


def test_logs_come_every_so_many_epochs() -> None:
    """In the words of ColossalAI's own, so whatever reads its logs reads these."""
    said = Said()
    run_threads(logged, 2, said)
    number = r"[\d.e+-]+"
    times = [
        " | ".join(f"{when}-{each}: last = {number} s, mean = {number} s" for each in ("epoch", "step"))
        for when in ("Train", "Test")
    ]
    for epoch in (0, 2):
        for line in (
            rf"\[Epoch {epoch} / Train\]: Loss = {number} \| LR = {0.1 * 0.5**epoch:.5g}( \| [\w/ ]+ = {number})+",
            rf"\[Epoch {epoch} / Test\]: Loss = {number}",
            rf"\[Epoch {epoch} / Train\]: {times[0]}".replace("|", r"\|"),
            rf"\[Epoch {epoch} / Test\]: {times[1]}".replace("|", r"\|"),
            rf"\[Epoch {epoch} / Train\]: GiB of each rank: .*",
        ):
            assert len([each for each in said.lines if re.fullmatch(line, each)]) == 1, "\n".join([line, *said.lines])
    assert len(said.lines) == 10


def other_bad_input() -> None:
    for make, message in (
        (lambda: hooks.SaveCheckpointHook(), "pass checkpoint_dir"),
        (lambda: hooks.LogMetricByEpochHook(Said(), interval=0), "interval must be at least 1"),  # type: ignore[arg-type]  # it is not asked
        (lambda: hooks.ThroughputHook(use_local=True), "remove use_local"),
    ):
        with pytest.raises(UsageError, match=message):
            make()
    engine, *_ = initialized({})
    with pytest.raises(UsageError, match=r"pass its timer to Trainer\(timer=...\)"):
        Trainer(engine).fit([MODEL.batch(4)], 1, hooks=[hooks.LogTimingByEpochHook(MultiTimer(), Said())])  # type: ignore[arg-type]  # as above
    with pytest.raises(UsageError, match="got another one"):
        Trainer(engine).fit(
            [MODEL.batch(4)], 1, hooks=[hooks.SaveCheckpointHook(checkpoint_dir="c", model=torch.nn.Linear(1, 1))]
        )


def test_other_bad_input() -> None:
    run_threads(other_bad_input, 1)


def into_tensorboard(folder: str) -> float:
    """The loss of the only epoch. Rank 0 writes it, though it has the first stage only."""
    engine, loader, *_ = initialized({}, get_dataloader(samples(8), 4))
    trainer = Trainer(engine)
    trainer.fit(loader, 1, hooks=[hooks.TensorboardHook(log_dir=folder, ranks=[0])])
    loss: float = trainer.states["metrics"]["train"]["Loss"]
    return loss


def test_tensorboard_has_the_loss_of_a_pipeline(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first, last = run_threads(into_tensorboard, 2, str(tmp_path))
    [_] = tmp_path.rglob("events.*")
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    [epoch] = found.Scalars("train/loss")
    assert epoch.value == pytest.approx(first)
    assert first == last


def test_tensorboard_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pipeflow-torch\[tensorboard\]"):
        hooks.TensorboardHook(log_dir="logs", ranks=[0])
