"""ProgressHook: progress on rank 0, as bars on a terminal, as lines elsewhere. Must not contain: how metrics are
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from pipeflow.training.engine import Step
from pipeflow.training.hooks.logs import items, joined
from pipeflow.training.trainer import Hook, Trainer

if TYPE_CHECKING:  # rich is loaded when something is shown
    from rich.console import Console, ConsoleOptions, RenderResult

    from pipeflow.engine.runtime.step import Output


class ProgressHook(Hook):
    """Shows progress and the metrics of steps and evaluations on rank 0: as bars on a terminal, elsewhere as lines,
    about ten per epoch. `Trainer(progress=True)` adds it together with hooks for the usual metrics.

    Args:
        console: rich console to write to; by default rich's global one, which `get_dist_logger` uses too, so log
            lines appear above the bars.
        clock: function that returns the time in seconds.
    """

    priority = 90

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = perf_counter) -> None:
        self.console = console
        self.clock = clock
        self._display: Bars | Lines | None = None
        self._batch = 0

    def before_fit(self, trainer: Trainer) -> None:
        if trainer.engine.model.context.rank == 0:
            import rich

            console = self.console or rich.get_console()
            self._display = (Bars if console.is_interactive else Lines)(console, self.clock)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if self._display is not None:
            self._display.step(_state(trainer), trainer.step_metrics)

    def before_evaluation(self, trainer: Trainer) -> None:
        self._batch = 0

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        self._batch += 1
        if self._display is not None:
            self._display.evaluating(_state(trainer), self._batch)

    def after_evaluation(self, trainer: Trainer) -> None:
        if self._display is not None:
            self._display.evaluated(_state(trainer), trainer.metrics["test"])

    def close(self, trainer: Trainer) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.close()


def _state(trainer: Trainer) -> TrainingProgress:
    return TrainingProgress(trainer.epoch, trainer.epochs, trainer.step_in_epoch, trainer.steps_in_epoch)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of training. `epoch` is the index of the current epoch, from 0; `step` counts its steps so far."""

    epoch: int
    epochs: int
    step: int
    steps: int

    @property
    def names(self) -> tuple[str, str]:
        """Texts for the epoch and the step, such as "epoch 2/10"; their widths stay the same during training."""
        epoch = f"{min(self.epoch + 1, self.epochs):>{len(str(self.epochs))}}/{self.epochs}"
        return f"epoch {epoch}", f"step {self.step:>{len(str(self.steps))}}/{self.steps}"


_LEAST, _MOST = 1.0, 30.0  # seconds between two lines, at the tenths of an epoch and between them


class Lines:
    """Plain lines: about ten per epoch, fewer if epochs are short."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._last = -math.inf

    def step(self, state: TrainingProgress, metrics: Mapping[str, float]) -> None:
        passed = self._clock() - self._last
        is_tenth = state.step * 10 // state.steps > (state.step - 1) * 10 // state.steps
        is_end = state.step == state.steps and state.epoch + 1 == state.epochs
        if (is_tenth and passed >= _LEAST) or passed >= _MOST or is_end:
            self._last = self._clock()
            self._print(f"{', '.join(state.names)}: {joined(metrics)}")

    def evaluating(self, state: TrainingProgress, batch: int) -> None:
        """Called after each batch of an evaluation."""

    def evaluated(self, state: TrainingProgress, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation with its metrics."""
        self._print(f"{state.names[0]}, test: {joined(metrics)}")

    def close(self) -> None:
        """Called at the end, also after an error."""

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


class Bars:
    """A bar for the epochs, a bar for the steps of the epoch, and the metrics below. They are redrawn after a step, at
    most once per `interval` seconds; no thread is used.
    """

    def __init__(self, console: Console, clock: Callable[[], float], interval: float = 0.5) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._clock = clock
        self._interval = interval
        self._drawn = -math.inf
        self._train, self._test = Metrics(), Metrics("test")
        columns = TextColumn("{task.description}"), BarColumn(None), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console, expand=True, get_time=clock)
        self._epochs, self._steps = self._progress.add_task(""), self._progress.add_task("")
        self._epoch = -1
        self._state: TrainingProgress | None = None  # the last one
        shown = Group(self._progress, self._train, self._test)
        self._live = Live(shown, console=console, auto_refresh=False)
        self._console = console

    def step(self, state: TrainingProgress, metrics: Mapping[str, float]) -> None:
        if state.epoch != self._epoch:
            self._epoch = state.epoch
            self._progress.reset(self._steps, total=state.steps, completed=state.step - 1)
        self._state, self._train.values = state, metrics
        if self._is_due() or state.step == state.steps:
            self._draw()

    def evaluating(self, state: TrainingProgress, batch: int) -> None:
        """Called after each batch of an evaluation."""
        if self._is_due():
            self._state = state
            self._draw(f"test batch {batch}")

    def evaluated(self, state: TrainingProgress, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation with its metrics."""
        self._state, self._test.values = state, dict(metrics)
        self._draw()

    def close(self) -> None:
        if self._state is not None:
            self._draw()
            self._live.stop()

    def _is_due(self) -> bool:
        return self._clock() - self._drawn >= self._interval

    def _draw(self, doing: str = "") -> None:
        assert self._state is not None  # it is drawn after a step or an evaluation
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor()  # which would stay hidden where the process is ended
        state, self._drawn = self._state, self._clock()
        epoch, step = state.names
        done = state.epoch + state.step / state.steps
        self._progress.update(self._epochs, description=epoch, completed=done, total=state.epochs)
        self._progress.update(self._steps, description=doing or step, completed=state.step)
        self._live.refresh()


@dataclass(slots=True)
class Metrics:
    """Metrics side by side, on as many lines as needed; no metric is broken across lines."""

    title: str = ""
    values: Mapping[str, float] | None = None
    gap: int = 3

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if not self.values:
            return
        line = Text(self.title, "bold")
        for name, value in items(self.values):
            item = Text.assemble((name, "bright_black"), " ", value)
            if line and len(line) + self.gap + len(item) > options.max_width:
                yield line
                line = Text()
            line = Text.assemble(line, " " * self.gap * bool(line), item)
        yield line
