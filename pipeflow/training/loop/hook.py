"""Hook: the base class of hooks, which a Trainer calls at fixed points. Must not contain: particular hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the trainer knows its hooks
    from pipeflow.runtime.step import Output
    from pipeflow.training.loop.engine import Step
    from pipeflow.training.loop.trainer import Trainer


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
        """Called after a step."""

    def after_training(self, trainer: Trainer) -> None:
        """Called after the last step of an epoch, before its evaluation."""

    def before_evaluation(self, trainer: Trainer) -> None:
        """Called before the first batch of an evaluation."""

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        """Called after each batch of an evaluation. Every rank receives `labels`, the labels of its replica's batch;
        `output.outputs` is None on ranks without the last stage.
        """

    def after_evaluation(self, trainer: Trainer) -> None:
        """Called after the last batch of an evaluation."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after an epoch and its evaluation; `trainer.epoch` already counts this epoch."""

    def after_fit(self, trainer: Trainer) -> None:
        """Called after the last epoch."""

    def close(self, trainer: Trainer) -> None:
        """Called last, also if training failed."""
