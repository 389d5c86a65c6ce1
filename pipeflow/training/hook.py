"""Hook: what is done at certain moments of training. What must not live here: what any of them does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the trainer knows its hooks
    from pipeflow.runtime.step import Output
    from pipeflow.training.engine import Step
    from pipeflow.training.trainer import Trainer


class Hook:
    """Base of hooks: each method is called by a `Trainer` on every rank, in this order, and does nothing here::

        before_fit
            before_epoch
                before_step, after_step                             for every step of the optimizer
            after_training                                          of this epoch
                before_evaluation, after_batch ..., after_evaluation    where a test loader is given
            after_epoch
        after_fit
        close                                                       also after an error

    Hooks may read and change the trainer: `trainer.engine`, `trainer.step_metrics`, `trainer.metrics`. Every rank needs
    the same hooks, since some of what they do takes all ranks, such as saving a checkpoint.

    Attributes:
        priority: hooks are called from the lowest to the highest, equal ones in the order in which they were given.
        needs_outputs: for which of "train" and "test" the last stage's outputs are to be kept.
    """

    priority = 50
    needs_outputs: frozenset[str] = frozenset()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the hook: plain values, those of rank 0; nothing by default. Hooks of one class
        are told apart by their order.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, before the first epoch of a run that is continued."""

    def before_fit(self, trainer: Trainer) -> None:
        """Before the first epoch; may set where training starts."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Before the first step of an epoch."""

    def before_step(self, trainer: Trainer) -> None:
        """Before a step; `trainer.trace_next_step()` has it measured."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """After a step."""

    def after_training(self, trainer: Trainer) -> None:
        """After the last step of an epoch, before its evaluation."""

    def before_evaluation(self, trainer: Trainer) -> None:
        """Before the first batch that is evaluated."""

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        """After a batch that is evaluated. `labels` are this replica's, on every rank; `output.outputs` are on the
        last stage's ranks, None elsewhere.
        """

    def after_evaluation(self, trainer: Trainer) -> None:
        """After the last batch that is evaluated."""

    def after_epoch(self, trainer: Trainer) -> None:
        """After an epoch and its evaluation; `trainer.epoch` counts it already."""

    def after_fit(self, trainer: Trainer) -> None:
        """After the last epoch."""

    def close(self, trainer: Trainer) -> None:
        """At the very end, whether training went well or not."""
