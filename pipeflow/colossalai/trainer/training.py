"""Trainer: pipeflow's Trainer with ColossalAI's signatures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pipeflow.training as native
from pipeflow.colossalai.engine import Engine
from pipeflow.colossalai.engine.accumulation import unwrapped
from pipeflow.colossalai.trainer.iterations import Iterations
from pipeflow.colossalai.trainer.states import states_of
from pipeflow.colossalai.trainer.timed import Timed
from pipeflow.core.errors import UsageError
from pipeflow.training import Hook, MultiTimer
from pipeflow.training.launch import current_config


class Trainer:
    """A `pipeflow.training.Trainer` with ColossalAI's names. An iteration is a batch.

    Args:
        engine: the engine that `initialize` returned.
        timer: a MultiTimer that measures "Train-epoch", "Train-step", "Test-epoch" and "Test-step".
        logger: a logger for hooks; it is only stored.

    Attributes:
        trainer: pipeflow's Trainer.
        states: states that hooks share; see `states_of`.
    """

    def __init__(self, engine: Engine, timer: MultiTimer | None = None, logger: Any = None) -> None:
        if not isinstance(engine, Engine):
            raise UsageError(f"a Trainer needs the engine that initialize returned, got {type(engine).__name__}")
        self.engine = engine
        self.timer = timer
        self.logger = logger
        self.trainer = native.Trainer(engine)
        self.states = states_of(self.trainer)
        self._iterations = Iterations(self, keeps_outputs=False)

    @property
    def cur_epoch(self) -> int:
        """Number of complete epochs; set it to start at a later one."""
        return self.trainer.epoch

    @cur_epoch.setter
    def cur_epoch(self, epoch: int) -> None:
        self.trainer.epoch = epoch

    @property
    def cur_step(self) -> int:
        """Number of batches trained so far, without the one that hooks are being called for."""
        steps = self.engine.steps * self.engine.gradient_accumulation
        return steps + self.engine.batches_of_step - self._iterations.uncounted

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int | None = None,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[Hook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Trains until `epochs` epochs are complete.

        Args:
            train_dataloader: batches `(inputs, labels)`.
            epochs: total number of epochs; by default NUM_EPOCHS.
            max_steps: number of batches after which to stop, rounded up to a whole step of the optimizer.
            test_dataloader: batches to evaluate after every `test_interval` epochs.
            test_interval: number of epochs between evaluations.
            hooks: hooks of this package, or of pipeflow.
            display_progress: show progress, once for the whole job.
            return_output_label: pass outputs and labels to hooks.

        Raises UsageError for a hook that needs outputs without them, without a number of epochs, and as
        `pipeflow.training.Trainer.fit` does.
        """
        if (epochs := getattr(current_config(), "num_epochs", None) if epochs is None else epochs) is None:
            raise UsageError("fit needs a number of epochs: pass epochs, or set NUM_EPOCHS in the configuration")
        steps = None if max_steps is None else -(-max_steps // self.engine.gradient_accumulation)
        test = None if test_dataloader is None else unwrapped(test_dataloader)
        with self._attached(hooks, display_progress, return_output_label):
            self.trainer.fit(
                unwrapped(train_dataloader), epochs, test_loader=test, test_interval=test_interval, max_steps=steps
            )

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[Hook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Evaluates all batches; `states["metrics"]["test"]` has the results. Arguments and errors are as in `fit`."""
        with self._attached(hooks, display_progress, return_output_label):
            self.trainer.evaluate(unwrapped(test_dataloader))

    def predict(self, data: object) -> object:
        """Returns the last stage's outputs for a batch of inputs on the ranks that have it, None on the others."""
        return self.trainer.predict(data)

    def _attached(self, hooks: Sequence[Hook] | None, shows: bool, keeps_outputs: bool) -> AbstractContextManager[None]:
        """Attaches these hooks to the trainer inside the `with` block."""
        hooks = [*(hooks or ()), *([] if self.timer is None else [Timed(self.timer)])]
        self._iterations = Iterations(self, keeps_outputs=keeps_outputs)
        return self._iterations.attached(native.Trainer(self.engine, hooks, progress=shows).hooks)
