"""Progress: bars on a terminal of any width, lines elsewhere, on rank 0 alone, closed whatever happens."""

from __future__ import annotations

import io
import logging
import re
from itertools import count

import pytest
import torch
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from pipeflow import make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import (
    BubbleHook,
    Engine,
    Hook,
    MemoryHook,
    ProgressHook,
    RateHook,
    Step,
    ThroughputHook,
    Trainer,
)
from pipeflow.training.hooks.progress import Lines, Metrics, TrainingProgress
from tests.runtime.work import build

MODEL = PlainModel()
STEPS = 20
BATCHES = [MODEL.batch(4)] * STEPS


def make_engine() -> Engine:
    pipeline = build(MODEL, make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2))
    return Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1))


def console(width: int = 80, *, is_terminal: bool) -> Console:
    """One that writes into a text."""
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None, _environ={})


def written(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def screens(text: str) -> list[str]:
    """What stood on the terminal after each time that it was drawn, without what scrolled away."""
    return [re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]|\r", "", part) for part in re.split(r"(?:\x1b\[2K(?:\x1b\[1A)?)+", text)]


class Fixed(Hook):
    """Sets what differs from run to run."""

    priority = 60

    def after_step(self, trainer: Trainer, step: Step) -> None:
        trainer.step_metrics |= {"samples/s": 12345.6, "memory GiB": 1.5}
        if "bubble" in trainer.step_metrics:
            trainer.step_metrics |= {"bubble": 0.25, "planned bubble": 0.2}

    def after_training(self, trainer: Trainer) -> None:
        trainer.metrics["test"] |= {"samples/s": 12345.6}


def shown(width: int, hooks: list[Hook]) -> tuple[str, str]:
    """What rank 0's and other ranks' consoles were given, and what the losses were."""
    on, clock = console(width, is_terminal=True), count()
    progress = ProgressHook(on, clock=lambda: float(next(clock)))
    trainer = Trainer(make_engine(), [Fixed(), progress, *hooks], progress=True)
    trainer.fit(BATCHES, 2, test_loader=BATCHES[:3])
    losses = f"loss {trainer.step_metrics['loss']:.4g}|loss {trainer.metrics['test']['loss']:.4g}"
    return written(on), losses


@pytest.mark.some(3)
@pytest.mark.parametrize(("width", "ranks", "data"), [(40, 1, 1), (60, 2, 1), (80, 4, 2), (120, 1, 1), (200, 1, 1)])
def test_bars(width: int, ranks: int, data: int) -> None:
    [(text, losses), *others] = run_threads(shown, ranks, width, [], data=data)
    assert all(other == "" for other, _ in others)
    train, test = losses.split("|")
    last = screens(text)[-1]
    assert max(map(len, last.splitlines())) <= width
    for wanted in (
        "epoch 2/2",
        "step 20/20",
        train,
        "learning rate 0.1",
        "samples/s 12,346",
        "memory GiB 1.5",
        "test ",
    ):
        assert wanted in last
    assert "bubble 25.0% (planned 20.0%)" in last
    assert test in last.partition("test ")[2]
    assert any("epoch 1/2" in screen and "step  7/20" in screen for screen in screens(text))
    assert any("test batch 2" in screen for screen in screens(text))
    assert text.endswith("\x1b[?25h")  # the cursor is there again


def test_a_metric_is_never_cut_in_two() -> None:
    values = {"loss": 0.1234, "learning rate": 0.001, "memory GiB": 1.5, "bubble": 0.25, "planned bubble": 0.2}
    for width in range(30, 100):
        on = console(width, is_terminal=False)
        on.print(Metrics("test", values))
        lines = written(on).splitlines()
        assert max(map(len, lines)) <= width
        for item in ("loss 0.1234", "learning rate 0.001", "memory GiB 1.5", "bubble 25.0% (planned 20.0%)"):
            assert sum(item in line for line in lines) == 1


def test_logs_stand_above_the_bars() -> None:
    on = console(60, is_terminal=True)
    logger = logging.getLogger("tests.progress")
    logger.addHandler(handler := RichHandler(console=on, show_time=False, show_path=False))

    class Says(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            logger.warning("step %d is over", trainer.engine.steps)

    try:
        run_threads(lambda: Trainer(make_engine(), [Says(), ProgressHook(on)]).fit(BATCHES[:3], 1), 1)
    finally:
        logger.removeHandler(handler)
    kept = [line for line in "\n".join(screens(written(on))).splitlines() if line.strip()]
    said = [index for index, line in enumerate(kept) if "is over" in line]
    assert len(said) == 3
    assert "step 3/3" in screens(written(on))[-1]
    assert "is over" not in screens(written(on))[-1].partition("epoch")[2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_bars_end_after_an_error(error: type[BaseException]) -> None:
    on = console(60, is_terminal=True)

    class Fails(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if trainer.engine.steps == 5:
                raise error

    def run() -> None:
        clock = iter([0.0, *[0.1] * 100])  # nothing is due after the first step
        with pytest.raises(error):
            Trainer(make_engine(), [ProgressHook(on, clock=lambda: next(clock)), Fails()]).fit(BATCHES, 1)

    run_threads(run, 1)
    assert "step  4/20" in screens(written(on))[-1]  # the last that was told, though it was not due
    assert written(on).endswith("\x1b[?25h")
    with Live(console=on, auto_refresh=False):  # there may be but one at a time
        pass


def test_nothing_is_drawn_where_training_does_not_begin() -> None:
    on = console(is_terminal=True)

    class Fails(Hook):
        def before_fit(self, trainer: Trainer) -> None:
            raise ValueError

    def run() -> None:
        with pytest.raises(ValueError, match=r"^$"):
            Trainer(make_engine(), [Fails(), ProgressHook(on)]).fit(BATCHES, 1)
        Trainer(make_engine(), [ProgressHook(on)]).evaluate(BATCHES[:2])

    run_threads(run, 1)
    assert written(on) == ""


class Broken(Hook):
    """Cannot be closed."""

    def close(self, trainer: Trainer) -> None:
        raise OSError("disk is full")


def test_every_hook_is_closed_whatever_another_one_raises() -> None:
    on = console(is_terminal=True)

    def run() -> None:
        with pytest.raises(OSError, match="disk is full"):
            Trainer(make_engine(), [Broken(), ProgressHook(on)]).fit(BATCHES, 1)

    run_threads(run, 1)
    assert written(on).endswith("\x1b[?25h")


def lines_of(seconds: float, steps: int, epochs: int = 2) -> list[str]:
    """The lines of a training in which a step takes so long."""
    on, now = console(is_terminal=False), [0.0]
    lines = Lines(on, lambda: now[0])
    for epoch in range(epochs):
        for step in range(1, steps + 1):
            now[0] += seconds
            lines.step(TrainingProgress(epoch, epochs, step, steps), {"loss": 0.5})
    return written(on).splitlines()


def test_lines_where_there_is_no_terminal() -> None:
    tenths = lines_of(1, 200)
    assert tenths[:3] == [f"epoch 1/2, step {step:>3}/200: loss = 0.5" for step in (1, 20, 40)]
    assert len(tenths) == 21
    assert tenths[-1] == "epoch 2/2, step 200/200: loss = 0.5"
    assert len(lines_of(60, 200, epochs=1)) == 200  # each takes longer than people want to wait
    assert len(lines_of(0.001, 20, epochs=100)) == 3  # and these are over in two seconds


def plain() -> str:
    on = console(is_terminal=False)
    Trainer(make_engine(), [ProgressHook(on)]).fit(BATCHES, 1, test_loader=BATCHES[:2])
    return written(on)


def test_lines_of_a_training() -> None:
    first, other = run_threads(plain, 2)
    assert other == ""
    begin, *_, end, test = first.splitlines()
    assert re.fullmatch(r"epoch 1/1, step  1/20: loss = \S+", begin)
    assert re.fullmatch(r"epoch 1/1, step 20/20: loss = \S+", end)
    assert re.fullmatch(r"epoch 1/1, test: loss = \S+", test)
    assert "\x1b" not in first


def test_progress_brings_what_it_shows() -> None:
    def made(own: list[Hook]) -> list[str]:
        return [type(hook).__name__ for hook in Trainer(make_engine(), own, progress=True).hooks]

    usual = ["RateHook", "ThroughputHook", "MemoryHook", "BubbleHook", "ProgressHook"]
    assert run_threads(made, 1, []) == [usual]
    own = [ThroughputHook(tokens_per_sample=3), MemoryHook(), BubbleHook(), RateHook(), ProgressHook()]
    assert sorted(run_threads(made, 1, own)[0]) == sorted(usual)
    assert run_threads(lambda: Trainer(make_engine()).hooks, 1) == [[]]
