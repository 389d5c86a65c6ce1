"""Trainer: epochs of steps, evaluations between them, and hooks for all else. What must not live here: what a step is,
and what hooks do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.training.data import DataParallelLoader
from pipeflow.training.engine import Engine, Scheduler
from pipeflow.training.hook import Hook


class Trainer:
    """Trains by epochs. Every rank makes the same calls, with loaders of its replica's data, as `get_dataloader` gives.

    Args:
        engine: which takes the steps.
        hooks: what else is done, such as logs, metrics and checkpoints.
        progress: whether rank 0 shows how training goes on, by a ProgressHook, and what is measured for it: the
            learning rate, the throughput, memory and the bubble, where `hooks` do not have them already.

    Attributes:
        epoch: how many are complete.
        metrics: of the last epoch, {"train": {name: value}, "test": {name: value}}; the mean losses as "loss".
        step_metrics: of the last step, by name.
        loader: of the training that runs.
        step_in_epoch, steps_in_epoch: how many steps of this epoch were taken, and how many it has.
        epochs: how many there are to be.
        schedulers: of learning rates, beside the engine's.
        should_stop: set it on every rank to end the training after the step.
    """

    def __init__(self, engine: Engine, hooks: Sequence[Hook] = (), *, progress: bool = False) -> None:
        if not isinstance(engine, Engine):
            raise UsageError(f"a Trainer needs a pipeflow.training.Engine, got {type(engine).__name__}")
        for hook in hooks:
            if not isinstance(hook, Hook):
                made = isinstance(hook, type) and issubclass(hook, Hook)
                hint = f"make one, as in {hook.__name__}()" if made else "derive its class from pipeflow.training.Hook"
                raise UsageError(f"a hook is a Hook, got {hook!r}: {hint}")
        if progress:
            from pipeflow.training.hooks.progress import with_progress  # hooks know their trainer

            hooks = with_progress(hooks)
        self.engine = engine
        self.hooks = sorted(hooks, key=lambda hook: hook.priority)
        self.epoch = 0
        self.metrics: dict[str, dict[str, float]] = {"train": {}, "test": {}}
        self.step_metrics: dict[str, float] = {}
        self.loader: Iterable[Any] = ()
        self.step_in_epoch = self.steps_in_epoch = self.epochs = 0
        self.schedulers: list[Scheduler] = []
        self.should_stop = False
        self._is_traced = False

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage, and so the outputs."""
        placement = self.engine.model.schedule.placement
        return self.engine.model.context.pipeline_rank in placement.ranks_of(placement.num_stages - 1)

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int,
        *,
        test_loader: Iterable[Any] | None = None,
        test_interval: int = 1,
        max_steps: int | None = None,
        return_outputs: bool | None = None,
    ) -> None:
        """Trains until `epochs` are complete, those of a run that is continued counted. Batches that do not fill a step
        at the end of an epoch are left out.

        Args:
            loader: of batches, `(inputs, labels)`, with a length.
            test_loader: what is evaluated after every `test_interval` epochs.
            max_steps: steps of the optimizer after which to stop.
            return_outputs: whether the last stage's outputs are kept for hooks; by default where a hook needs them.

        Raises UsageError for loaders without a batch or a length, for a hook that needs outputs where they are not
        kept; and as `Engine.train_step`.
        """
        self._require(loader, "loader")
        if test_loader is not None:
            self._require(test_loader, "test_loader")
        if (count := self._length(loader)) < (accumulated := self.engine.gradient_accumulation):
            raise UsageError(f"loader has {count} batches, and a step takes gradient_accumulation={accumulated}")
        if test_interval < 1:
            raise UsageError(f"test_interval must be at least 1, got {test_interval}")
        keeps = self._kept_outputs(return_outputs)
        self.loader, self.epochs, self.should_stop = loader, epochs, False
        try:
            for hook in self.hooks:
                hook.before_fit(self)
            while self.epoch < epochs and not self._is_over(max_steps):
                self._train_epoch(keeps, max_steps)
                if self.step_in_epoch < self.steps_in_epoch:
                    break
                if test_loader is not None and (self.epoch + 1) % test_interval == 0:
                    self._evaluate(test_loader, keeps)
                self.epoch += 1
                for hook in self.hooks:
                    hook.after_epoch(self)
            for hook in self.hooks:
                hook.after_fit(self)
        finally:
            with ExitStack() as closing:  # each is closed, whatever closing another one raises
                for hook in reversed(self.hooks):
                    closing.callback(hook.close, self)

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluates all batches of `loader`. Returns `metrics["test"]`: the mean "loss", where there is a criterion,
        and the metrics of hooks. Raises UsageError as `fit`.
        """
        self._require(loader, "loader")
        self._evaluate(loader, self._kept_outputs(None))
        return self.metrics["test"]

    def predict(self, inputs: object) -> object:
        """The last stage's outputs for a batch of inputs, on the ranks that have it; None on the others."""
        with self._evaluating():
            return self.engine.execute(iter([(inputs, None)]), forward_only=True, return_outputs=True).outputs

    def trace_next_step(self) -> None:
        """Has the next step measured, for its `timeline`; for hooks, on every rank alike."""
        self._is_traced = True

    def told_by_last_stage(self, value: float) -> float:
        """The `value` of the last stage's rank, on every rank; all of them call it together."""
        context, placement = self.engine.model.context, self.engine.model.schedule.placement
        with context.alarm.raised_everywhere():
            rows = all_gather(context.world, [value])
        teller = context.layout.pipeline_ranks(0)[placement.rank_of(placement.num_stages - 1)]
        return rows[teller][0]

    def _train_epoch(self, keeps: frozenset[str], max_steps: int | None) -> None:
        loader, engine = self.loader, self.engine
        if isinstance(loader, DataParallelLoader):
            loader.set_epoch(self.epoch)
        batches = iter(loader)
        self.steps_in_epoch = self._length(loader) // engine.gradient_accumulation
        self.step_in_epoch = self.steps_in_epoch - self._left(loader) // engine.gradient_accumulation
        total, samples = 0.0, 0
        engine.train()
        for hook in self.hooks:
            hook.before_epoch(self)
        while self.step_in_epoch < self.steps_in_epoch and not self._is_over(max_steps):
            for hook in self.hooks:
                hook.before_step(self)
            is_traced, self._is_traced = self._is_traced, False
            step = engine.train_step(batches, return_outputs="train" in keeps, trace=is_traced)
            self.step_in_epoch += 1
            self.step_metrics["loss"] = float(step.loss)
            total, samples = total + self.step_metrics["loss"] * step.samples, samples + step.samples
            for hook in self.hooks:
                hook.after_step(self, step)
        self.metrics["train"]["loss"] = total / samples if samples else math.nan
        for hook in self.hooks:
            hook.after_training(self)

    def _evaluate(self, loader: Iterable[Any], keeps: frozenset[str]) -> None:
        total, samples = 0.0, 0
        self.metrics["test"].clear()
        with self._evaluating():
            for hook in self.hooks:
                hook.before_evaluation(self)
            for batch in loader:
                output = self.engine.execute(iter([batch]), forward_only=True, return_outputs="test" in keeps)
                if output.loss is not None:
                    total, samples = total + float(output.loss) * output.samples, samples + output.samples
                for hook in self.hooks:
                    hook.after_batch(self, output, batch[1])
            if samples:
                self.metrics["test"]["loss"] = total / samples
            for hook in self.hooks:
                hook.after_evaluation(self)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, the model is in the mode of evaluation."""
        was_training = self.engine.model.training
        self.engine.eval()
        try:
            yield
        finally:
            self.engine.train(was_training)

    def _is_over(self, max_steps: int | None) -> bool:
        return self.should_stop or (max_steps is not None and self.engine.steps >= max_steps)

    def _kept_outputs(self, return_outputs: bool | None) -> frozenset[str]:
        """When outputs are kept: as the hooks need them, or as the caller says."""
        needing = {when: hook for hook in self.hooks for when in hook.needs_outputs}
        if return_outputs is None:
            return frozenset(needing)
        if needing and not return_outputs:
            hook = type(next(iter(needing.values()))).__name__
            raise UsageError(f"{hook} needs the outputs, and return_outputs=False drops them: leave one of the two out")
        return frozenset({"train", "test"}) if return_outputs else frozenset()

    def _require(self, loader: Iterable[Any], name: str) -> None:
        if not isinstance(loader, Sized):
            raise UsageError(
                f"{name} is a {type(loader).__name__}, which has no length: pass a loader or a list of batches"
            )
        if not len(loader):
            raise UsageError(f"{name} has no batch: use a smaller batch_size, or drop_last=False")

    @staticmethod
    def _length(loader: Iterable[Any]) -> int:
        assert isinstance(loader, Sized)
        return len(loader)

    @classmethod
    def _left(cls, loader: Iterable[Any]) -> int:
        """How many batches of this epoch are to come."""
        return loader.batches_left() if isinstance(loader, DataParallelLoader) else cls._length(loader)
