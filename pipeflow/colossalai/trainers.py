"""ColossalAI's `colossalai.trainer`: pipeflow's Trainer with its signatures and its names of metrics and times, which
calls its hooks for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import pipeflow.training as native
from pipeflow.colossalai.engines import Engine, unwrapped
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.step import Output
from pipeflow.training import Hook, MultiTimer, Step
from pipeflow.training.launch import current_config

HERE = {"Loss": "loss", "Accuracy": "accuracy", "LR": "learning rate", "Throughput": "samples/s"}
THERE = {here: there for there, here in HERE.items()}


class MetricNames(MutableMapping[str, float]):
    """A trainer's own metrics, under ColossalAI's names."""

    def __init__(self, metrics: Callable[[], dict[str, float]]) -> None:
        self._metrics = metrics

    def __getitem__(self, name: str) -> float:
        return self._metrics()[HERE.get(name, name)]

    def __setitem__(self, name: str, value: float) -> None:
        self._metrics()[HERE.get(name, name)] = value

    def __delitem__(self, name: str) -> None:
        del self._metrics()[HERE.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return (THERE.get(name, name) for name in self._metrics())

    def __len__(self) -> int:
        return len(self._metrics())


def states_of(trainer: native.Trainer) -> dict[str, Any]:
    """The states: "metrics" with "train" and "test", and "step_metrics"; each maps names to numbers."""
    train, test = MetricNames(lambda: trainer.metrics["train"]), MetricNames(lambda: trainer.metrics["test"])
    return {"metrics": {"train": train, "test": test}, "step_metrics": MetricNames(lambda: trainer.step_metrics)}


class Timed(Hook):
    """Measures "Train-epoch", "Train-step", "Test-epoch" and "Test-step", and keeps their histories."""

    priority = -100  # before hooks that read them

    def __init__(self, timer: MultiTimer) -> None:
        self.timer = timer

    def before_epoch(self, trainer: native.Trainer) -> None:
        self.timer.start("Train-epoch")

    def before_step(self, trainer: native.Trainer) -> None:
        self.timer.start("Train-step")

    def after_step(self, trainer: native.Trainer, step: Step) -> None:
        self.timer.stop("Train-step", keep_in_history=True)

    def after_training(self, trainer: native.Trainer) -> None:
        self.timer.stop("Train-epoch", keep_in_history=True)

    def before_evaluation(self, trainer: native.Trainer) -> None:
        self.timer.start("Test-epoch")
        self.timer.start("Test-step")

    def after_batch(self, trainer: native.Trainer, output: Output, labels: object) -> None:
        self.timer.stop("Test-step", keep_in_history=True)
        self.timer.start("Test-step")

    def after_evaluation(self, trainer: native.Trainer) -> None:
        self.timer.stop("Test-epoch", keep_in_history=True)


class BaseHook(Hook):
    """pipeflow's Hook with ColossalAI's methods, which do nothing here. They are called on every rank::

        after_hook_is_attached
        before_train
            before_train_epoch
                before_train_iter, after_train_iter                 for every batch
            after_train_epoch
            before_test, before_test_epoch
                before_test_iter, after_test_iter                   for every batch
            after_test_epoch, after_test
        after_train

    `output`, `label` and `loss` are None on ranks without the last stage; output and label also with
    `return_output_label=False`.

    Args:
        priority: hooks are called in ascending order of priority; hooks of equal priority in the order given.
    """

    attached_to: Trainer

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def attach(self, trainer: Trainer, *, keeps_outputs: bool) -> None:
        """Attaches the hook to a trainer, before it trains or evaluates."""
        self.attached_to = trainer
        told = {"train": "after_train_iter", "test": "after_test_iter"}
        wanted = {when for when, name in told.items() if getattr(type(self), name) is not getattr(BaseHook, name)}
        self.needs_outputs = frozenset(wanted) if keeps_outputs else frozenset()
        self.after_hook_is_attached(trainer)

    def init_runner_states(self, trainer: Trainer, key: str, val: Any) -> None:
        """Sets a state of the trainer unless it exists."""
        trainer.states.setdefault(key, val)

    def after_hook_is_attached(self, trainer: Trainer) -> None: ...

    def before_train(self, trainer: Trainer) -> None: ...

    def after_train(self, trainer: Trainer) -> None: ...

    def before_train_iter(self, trainer: Trainer) -> None: ...

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None: ...

    def before_train_epoch(self, trainer: Trainer) -> None: ...

    def after_train_epoch(self, trainer: Trainer) -> None: ...

    def before_test(self, trainer: Trainer) -> None: ...

    def after_test(self, trainer: Trainer) -> None: ...

    def before_test_epoch(self, trainer: Trainer) -> None: ...

    def after_test_epoch(self, trainer: Trainer) -> None: ...

    def before_test_iter(self, trainer: Trainer) -> None: ...

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None: ...

    def before_fit(self, trainer: native.Trainer) -> None:
        self.before_train(self.attached_to)

    def before_epoch(self, trainer: native.Trainer) -> None:
        self.before_train_epoch(self.attached_to)

    def before_step(self, trainer: native.Trainer) -> None:
        self.before_train_iter(self.attached_to)

    def after_step(self, trainer: native.Trainer, step: Step) -> None:
        self.attached_to.tell(self)

    def after_training(self, trainer: native.Trainer) -> None:
        self.after_train_epoch(self.attached_to)

    def before_evaluation(self, trainer: native.Trainer) -> None:
        self.before_test(self.attached_to)
        self.before_test_epoch(self.attached_to)

    def after_batch(self, trainer: native.Trainer, output: Output, labels: object) -> None:
        self.after_test_iter(self.attached_to, *self.attached_to.last_batch)

    def after_evaluation(self, trainer: native.Trainer) -> None:
        self.after_test_epoch(self.attached_to)
        self.after_test(self.attached_to)

    def after_fit(self, trainer: native.Trainer) -> None:
        self.after_train(self.attached_to)


class Trainer:
    """A `pipeflow.training.Trainer` with ColossalAI's names. An iteration is a batch. It listens to the engine, and
    calls hooks between two batches of a step. Before the first and after the last batch of a step, pipeflow's trainer
    calls them, in the order of all hooks.

    Args:
        engine: the engine that `initialize` returned.
        timer: a MultiTimer that measures "Train-epoch", "Train-step", "Test-epoch" and "Test-step".
        logger: a logger for hooks; it is only stored.

    Attributes:
        trainer: pipeflow's Trainer.
        states: states that hooks share; see `states_of`.
        last_batch: its output, label and loss, as hooks get them.
    """

    def __init__(self, engine: Engine, timer: MultiTimer | None = None, logger: Any = None) -> None:
        if not isinstance(engine, Engine):
            raise UsageError(f"a Trainer needs the engine that initialize returned, got {type(engine).__name__}")
        self.engine = engine
        self.timer = timer
        self.logger = logger
        self.trainer = native.Trainer(engine)
        self.states = states_of(self.trainer)
        self.last_batch: tuple[Any, Any, Any] = (None, None, None)
        self._hooks: list[BaseHook] = []
        self._keeps_outputs = False
        self._uncounted = 0  # 1 while hooks are called for a batch that `cur_step` does not count yet

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
        return steps + self.engine.batches_of_step - self._uncounted

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

    @contextmanager
    def _attached(self, hooks: Sequence[Hook] | None, shows: bool, keeps_outputs: bool) -> Iterator[None]:
        """Attaches these hooks to the trainer inside the `with` block. Raises UsageError for a hook that needs outputs
        if none are kept.
        """
        hooks = [*(hooks or ()), *([] if self.timer is None else [Timed(self.timer)])]
        hooks = native.Trainer(self.engine, hooks, progress=shows).hooks  # in their order, with those that show
        self._hooks, self._keeps_outputs = [hook for hook in hooks if isinstance(hook, BaseHook)], keeps_outputs
        for hook in self._hooks:
            hook.attach(self, keeps_outputs=keeps_outputs)
        needing = [type(hook).__name__ for hook in hooks if hook.needs_outputs]
        if needing and not keeps_outputs:
            raise UsageError(f"{needing[0]} needs outputs, and return_output_label=False drops them: leave one out")
        self.trainer.hooks, self.engine.listener = hooks, self
        try:
            yield
        finally:
            self.trainer.hooks, self.engine.listener = [], None

    def before_batch(self, *, is_training: bool) -> None:
        """Called by the engine before each batch of training or evaluation."""
        for hook in self._hooks:
            if not is_training:
                hook.before_test_iter(self)
            elif self.engine.batches_of_step:
                hook.before_train_iter(self)

    def after_batch(self, output: Output, labels: object, *, is_training: bool) -> None:
        """Called by the engine after a batch, with its labels."""
        is_here = self.trainer.has_last_stage
        self.last_batch = (
            output.outputs,
            labels if is_here and self._keeps_outputs else None,
            output.loss if is_here else None,
        )
        if is_training and self.engine.batches_of_step < self.engine.gradient_accumulation:
            for hook in self._hooks:
                self.tell(hook)

    def tell(self, hook: BaseHook) -> None:
        """Calls a hook for the last batch of training."""
        self._uncounted = 1
        try:
            hook.after_train_iter(self, *self.last_batch)
        finally:
            self._uncounted = 0
