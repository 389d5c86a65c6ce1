"""Trainer: the loop over epochs, steps and evaluations, and Hook, the base class of what it calls. Must not contain:
how a step is taken, or particular hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.microbatch import Divided, merge
from pipeflow.engine.runtime.step import Output
from pipeflow.training.data import DataParallelLoader
from pipeflow.training.engine import Engine, Step
from pipeflow.training.optim.rates import Scheduler
from pipeflow.training.position import Position, length_of, require_batches


def labels_of(batch: Any, *, merged: bool) -> object:
    """The labels of a batch of inputs and labels; None if they are among named inputs. Those of a divided batch are
    `merged` as outputs are, or else None.
    """
    parts: list[Any] = batch.microbatches if isinstance(batch, Divided) else [batch]
    labels = [None if isinstance(part, dict) else part[1] for part in parts]
    if len(labels) == 1:
        return labels[0]
    return merge(labels) if merged else None


class Hook:
    """Base class of hooks. A `Trainer` calls these methods on every rank, in this order; here they do nothing::

        before_fit
            before_epoch
                before_step, after_step                             for every optimizer step
            after_training                                          after the last step of the epoch
                before_evaluation, after_batch ..., after_evaluation    if fit has a test_loader
            after_epoch
        after_fit
        close                                                       also after an error

    Hooks may read and change the trainer: `trainer.engine`, `trainer.step_metrics`, `trainer.metrics`. Every rank needs
    the same hooks, because some of them, such as CheckpointHook, need all ranks to take part.

    Attributes:
        priority: hooks are called in ascending order of priority; hooks of equal priority in the order given.
        needs_outputs: when the hook needs the last stage's outputs: a set of "train" and "test".
    """

    priority = 50
    needs_outputs: frozenset[str] = frozenset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the plain values that a checkpoint stores for the hook, taken from rank 0; by default none. Several
        hooks of one class are matched by their order.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, before the first epoch of a resumed run."""

    def before_fit(self, trainer: Trainer) -> None:
        """Called before the first epoch; may set where training starts."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Called before the first step of an epoch."""

    def before_step(self, trainer: Trainer) -> None:
        """Called before a step; `trainer.trace_next_step()` here measures its timeline."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Called after each training step, with its loss and metrics."""

    def after_training(self, trainer: Trainer) -> None:
        """Called after the last step of an epoch, before its evaluation."""

    def before_evaluation(self, trainer: Trainer) -> None:
        """Called before the first batch of an evaluation."""

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        """Called after each batch of an evaluation. Every rank receives `labels`, the labels of its replica's batch, or
        None if they are among the inputs; `output.outputs` is None on ranks without the last stage.
        """

    def after_evaluation(self, trainer: Trainer) -> None:
        """Called after the last batch of an evaluation."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after an epoch and its evaluation; `trainer.epoch` already counts this epoch."""

    def after_fit(self, trainer: Trainer) -> None:
        """Called after the last epoch, also if no step was left to run."""

    def close(self, trainer: Trainer) -> None:
        """Called last, also if training failed."""


class Trainer:
    """Trains an Engine's model for a number of epochs and calls hooks. All ranks make the same calls, each with a
    loader of its replica's data, such as `get_dataloader` returns.

    Args:
        engine: the Engine that takes the steps.
        hooks: add everything else, such as logs, metrics and checkpoints.
        progress: if True, rank 0 shows progress. This adds a ProgressHook and the hooks for what it shows (learning
            rate, throughput, memory, bubble), unless `hooks` has one of the same class.

    Attributes:
        epoch: number of completed epochs.
        metrics: metrics of the last epoch, {"train": {name: value}, "test": {name: value}}; "loss" is the mean loss
            over what the Pipeline's `weigh` counts, without steps whose loss is not finite.
        step_metrics: metrics of the last step, by name.
        loader, test_loader: arguments of the current `fit`.
        step_in_epoch, steps_in_epoch: number of steps taken in this epoch, and number of steps that it has.
        epochs: number of epochs to train, as passed to `fit`.
        schedulers: learning-rate schedulers besides the engine's.
        should_stop: set it to True on every rank to stop training after the current step.
    """

    progress_hooks: ClassVar[Sequence[type[Hook]]] = ()  # set by pipeflow.training.hooks

    def __init__(self, engine: Engine, hooks: Sequence[Hook] = (), *, progress: bool = False) -> None:
        if not isinstance(engine, Engine):
            made = "make one, as in Engine(model, optimizer)"
            raise UsageError(f"a Trainer needs a pipeflow.training.Engine, got {type(engine).__name__}: {made}")
        for hook in hooks:
            if not isinstance(hook, Hook):
                made = isinstance(hook, type) and issubclass(hook, Hook)
                hint = f"make one, as in {hook.__name__}()" if made else "derive its class from pipeflow.training.Hook"
                raise UsageError(f"a hook must be a Hook, got {hook!r}: {hint}")
        if progress:
            missing = [kind for kind in self.progress_hooks if not any(isinstance(hook, kind) for hook in hooks)]
            hooks = [*hooks, *(kind() for kind in missing)]
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
        """True if this rank has the last stage, and so receives the outputs."""
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
        """Trains until `epochs` epochs are complete, including those before a resumed checkpoint. Batches at the end
        of an epoch that do not fill a step are skipped. If training stops within an epoch, the next `fit` with the
        same loader continues it; hooks' `after_training` is called once all steps of the epoch were taken.

        Args:
            loader: batches `(inputs, labels)`; must have a length.
            epochs: total number of epochs.
            test_loader: batches to evaluate after every `test_interval` epochs; must have a length.
            test_interval: number of epochs between evaluations.
            max_steps: total number of optimizer steps after which to stop; None for no limit.
            return_outputs: keep the last stage's outputs for hooks; by default if a hook needs them.

        Raises UsageError for a loader without a length or with too few batches, and for a hook that needs outputs if
        `return_outputs` is False; also the errors of `Engine.train_step`.
        """
        require_batches(loader, "loader")
        if test_loader is not None:
            require_batches(test_loader, "test_loader")
        if (count := length_of(loader)) < (accumulated := self.engine.gradient_accumulation):
            raise UsageError(f"loader has {count} batches, and a step takes gradient_accumulation={accumulated}")
        require_positive(test_interval=test_interval)
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
        """Evaluates all batches of `loader`. Returns `metrics["test"]`: the mean "loss" if the Pipeline has a
        criterion, and the metrics of hooks. Raises UsageError as `fit` does.
        """
        require_batches(loader, "loader")
        self._evaluate(loader, self._kept_outputs(None))
        return self.metrics["test"]

    def predict(self, inputs: object) -> object:
        """Runs a batch of inputs in evaluation mode. Returns the last stage's outputs on the ranks that have it, None
        on the others.
        """
        with self._evaluating():
            return self.engine.execute(iter([(inputs, None)]), forward_only=True, return_outputs=True).outputs

    def trace_next_step(self) -> None:
        """Measures the next step, so that its Step has a `timeline`. Hooks call it on every rank."""
        self._is_traced = True

    def told_by_last_stage(self, value: float) -> float:
        """Returns the `value` that a rank with the last stage passed, on every rank. All ranks call it together."""
        context, placement = self.engine.model.context, self.engine.model.schedule.placement
        with context.alarm.raised_everywhere():
            rows = all_gather(context.world, [value])
        teller = context.layout.pipeline_ranks(0)[placement.rank_of(placement.num_stages - 1)]
        return rows[teller][0]

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of training in plain values: epoch, steps, position in the data, sums of this epoch,
        learning rates and the state of hooks. All ranks call it together, between two steps. Together with what
        `save_checkpoint` stores (weights, optimizer, random states), training can resume from it.
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
        """Raises UsageError if training cannot resume from `state` with these loaders and learning-rate schedulers."""
        saved, here = [name for name, _ in state["rates"]], [type(each).__name__ for each in self._all_schedulers()]
        if saved != here:
            raise UsageError(
                f"the checkpoint has states of {', '.join(saved) or 'no scheduler'}, but this run has "
                f"{', '.join(here) or 'no scheduler'}: continue with the same schedulers"
            )
        self._position.require_fits(state["position"], state["epoch"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the progress of training; the next step continues from it. Raises UsageError as `require_fits`
        does, and then changes nothing.
        """
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
        """True if all steps of this epoch were taken."""
        return self._position.is_trained and self._position.epoch == self.epoch

    def _train_epoch(self, keeps: frozenset[str], max_steps: int | None) -> None:
        engine, position = self.engine, self._position
        batches = position.begin(self.epoch)
        self.steps_in_epoch = length_of(self.loader) // engine.gradient_accumulation
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
            self.step_metrics["loss"] = float(step.loss) if step.read_loss is None else step.read_loss
            position.count(self.step_metrics["loss"], step.weight, engine.gradient_accumulation)
            position.is_trained = self.step_in_epoch == self.steps_in_epoch
            for hook in self.hooks:
                hook.after_step(self, step)
        self.metrics["train"]["loss"] = position.mean_loss
        if position.is_trained and not position.is_told:
            for hook in self.hooks:
                hook.after_training(self)
            position.is_told = True

    def _evaluate(self, loader: Iterable[Any], keeps: frozenset[str]) -> None:
        total: float | Tensor = 0.0  # a tensor on a device, so that the host does not wait for each batch
        weight = 0.0
        self.metrics["test"].clear()
        with self._evaluating():
            for hook in self.hooks:
                hook.before_evaluation(self)
            for batch in loader:
                output = self.engine.execute(iter([batch]), forward_only=True, return_outputs="test" in keeps)
                if output.loss is not None:
                    total, weight = total + output.loss.double() * output.weight, weight + output.weight
                labels = labels_of(batch, merged="test" in keeps)
                for hook in self.hooks:
                    hook.after_batch(self, output, labels)
            if weight:
                self.metrics["test"]["loss"] = float(total) / weight
            for hook in self.hooks:
                hook.after_evaluation(self)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Puts the model in evaluation mode inside the `with` block."""
        was_training = self.engine.model.training
        self.engine.eval()
        try:
            yield
        finally:
            self.engine.train(was_training)

    def _is_over(self, max_steps: int | None) -> bool:
        return self.should_stop or (max_steps is not None and self.engine.steps >= max_steps)

    def _kept_outputs(self, return_outputs: bool | None) -> frozenset[str]:
        """The phases ("train", "test") in which outputs are kept: those that hooks need, or as the caller says."""
        needing = {when: hook for hook in self.hooks for when in hook.needs_outputs}
        if return_outputs is None:
            return frozenset(needing)
        if needing and not return_outputs:
            hook = type(next(iter(needing.values()))).__name__
            raise UsageError(f"{hook} needs the outputs, but return_outputs=False drops them: remove one of the two")
        return frozenset({"train", "test"}) if return_outputs else frozenset()
