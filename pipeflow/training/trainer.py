"""Trainer: epochs of steps, evaluations between them, and hooks for all else. What must not live here: what a step is,
and what hooks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.training.data import DataParallelLoader
from pipeflow.training.engine import Engine, Scheduler
from pipeflow.training.hook import Hook
from pipeflow.training.position import Position


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
        loader, test_loader: of the training that runs.
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
        self.test_loader: Iterable[Any] | None = None
        self.step_in_epoch = self.steps_in_epoch = self.epochs = 0
        self.schedulers: list[Scheduler] = []
        self.should_stop = False
        self._is_traced = False
        self._position = Position(engine.model.context)

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
        at the end of an epoch are left out. An epoch in which training stopped goes on in the next `fit` with the same
        loader; `after_training` comes once all of its steps were taken.

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
        self.loader, self.test_loader, self.epochs, self.should_stop = loader, test_loader, epochs, False
        self._position.attach(loader)
        self.engine.forget_batches()  # of a step that an error cut short
        try:
            for hook in self.hooks:
                hook.before_fit(self)
            while self.epoch < epochs and (self._is_trained() or not self._is_over(max_steps)):
                self._train_epoch(keeps, max_steps)
                if not self._is_trained():
                    break
                if test_loader is not None and (self.epoch + 1) % test_interval == 0:
                    if isinstance(test_loader, DataParallelLoader):
                        test_loader.set_epoch(self.epoch)
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

    def state_dict(self) -> dict[str, Any]:
        """Where training is, in plain values: epoch, steps, position in the data, sums of this epoch, learning rates,
        and what hooks keep. All ranks call it together, between two steps; with the weights, the optimizer and the
        random states of `save_checkpoint` it is all that training needs to go on.
        """
        return {
            "epoch": self.epoch,
            "steps": self.engine.steps,
            "skipped": self.engine.skipped,
            "metrics": {when: dict(metrics) for when, metrics in self.metrics.items()},
            "rates": [(type(each).__name__, each.state_dict()) for each in self._all_schedulers()],
            "hooks": [(type(hook).__name__, state) for hook in self.hooks if (state := hook.state_dict())],
            "position": self._position.state_dict(),
        }

    def require_fits(self, state: dict[str, Any]) -> None:
        """Raises UsageError for a state that training cannot go on from with these loaders and learning rates."""
        saved, here = [name for name, _ in state["rates"]], [type(each).__name__ for each in self._all_schedulers()]
        if saved != here:
            raise UsageError(
                f"the checkpoint has learning rates of {', '.join(saved) or 'no scheduler'}, and this run of "
                f"{', '.join(here) or 'no scheduler'}: continue with the same schedulers"
            )
        self._position.require_fits(state["position"], state["epoch"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on there with the next step. Raises UsageError as `require_fits`, with nothing changed."""
        self.require_fits(state)
        self.epoch, self.engine.steps, self.engine.skipped = state["epoch"], state["steps"], state["skipped"]
        self.metrics = {when: dict(metrics) for when, metrics in state["metrics"].items()}
        for scheduler, (_, rates) in zip(self._all_schedulers(), state["rates"], strict=True):
            scheduler.load_state_dict(rates)
            if self.engine.steps and hasattr(scheduler, "optimizer"):
                scheduler.optimizer._opt_called = True  # or torch warns that it took no step in this process
        saved = list(state["hooks"])
        for hook in self.hooks:
            found = next((each for each in saved if each[0] == type(hook).__name__), None)
            if found is not None:
                saved.remove(found)
                hook.load_state_dict(found[1])
        self._position.load_state_dict(state["position"])

    def _all_schedulers(self) -> list[Scheduler]:
        own = self.engine.scheduler
        return [*([] if own is None else [own]), *self.schedulers]

    def _is_trained(self) -> bool:
        """Whether all steps of this epoch were taken."""
        return self._position.is_trained and self._position.epoch == self.epoch

    def _train_epoch(self, keeps: frozenset[str], max_steps: int | None) -> None:
        engine, position = self.engine, self._position
        batches = position.begin(self.epoch)
        self.steps_in_epoch = self._length(self.loader) // engine.gradient_accumulation
        left = 0 if position.is_trained else position.batches_left() // engine.gradient_accumulation
        self.step_in_epoch = self.steps_in_epoch - left
        engine.train()
        for hook in self.hooks:
            hook.before_epoch(self)
        position.is_trained = left == 0
        while not position.is_trained and not self._is_over(max_steps):
            for hook in self.hooks:
                hook.before_step(self)
            is_traced, self._is_traced = self._is_traced, False
            step = engine.train_step(batches, return_outputs="train" in keeps, trace=is_traced)
            self.step_in_epoch += 1
            self.step_metrics["loss"] = float(step.loss)
            position.count(self.step_metrics["loss"], step.samples, engine.gradient_accumulation)
            position.is_trained = self.step_in_epoch == self.steps_in_epoch
            for hook in self.hooks:
                hook.after_step(self, step)
        self.metrics["train"]["loss"] = position.mean_loss
        if position.is_trained and not position.is_told:
            for hook in self.hooks:
                hook.after_training(self)
            position.is_told = True

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
