"""Iterations: calls hooks for every batch; a step of the optimizer may take several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeflow.colossalai.engine import Engine, has_last_stage
from pipeflow.colossalai.trainer.hooks.base import BaseHook
from pipeflow.core.errors import UsageError
from pipeflow.runtime.step import Output
from pipeflow.training import Hook

if TYPE_CHECKING:  # a trainer has them
    from pipeflow.colossalai.trainer.training import Trainer


class Iterations:
    """Listens to the engine and calls hooks between two batches of a step. Before the first and after the last batch of
    a step, pipeflow's trainer calls them, in the order of all hooks.

    Args:
        trainer: the trainer whose hooks are called.
        keeps_outputs: True if hooks get outputs and labels.

    Attributes:
        uncounted: 1 while hooks are called for a batch that `cur_step` does not count yet; else 0.
    """

    def __init__(self, trainer: Trainer, *, keeps_outputs: bool) -> None:
        self.trainer = trainer
        self.hooks: list[BaseHook] = []
        self.keeps_outputs = keeps_outputs
        self.uncounted = 0
        self._last: tuple[Any, Any, Any] = (None, None, None)

    @contextmanager
    def attached(self, hooks: list[Hook]) -> Iterator[None]:
        """Attaches the hooks to the trainer inside the `with` block. Raises UsageError for a hook that needs outputs if
        none are kept.
        """
        self.hooks = [hook for hook in hooks if isinstance(hook, BaseHook)]
        for hook in self.hooks:
            hook.attach(self)
            hook.after_hook_is_attached(self.trainer)
        needing = [type(hook).__name__ for hook in hooks if hook.needs_outputs]
        if needing and not self.keeps_outputs:
            raise UsageError(f"{needing[0]} needs outputs, and return_output_label=False drops them: leave one out")
        self.trainer.trainer.hooks, self.engine.listener = hooks, self
        try:
            yield
        finally:
            self.trainer.trainer.hooks, self.engine.listener = [], None

    @property
    def engine(self) -> Engine:
        return self.trainer.engine

    def before_batch(self, *, is_training: bool) -> None:
        for hook in self.hooks:
            if not is_training:
                hook.before_test_iter(self.trainer)
            elif self.engine.batches_of_step:
                hook.before_train_iter(self.trainer)

    def after_batch(self, output: Output, labels: object, *, is_training: bool) -> None:
        is_here = has_last_stage(self.engine)
        kept = labels if is_here and self.keeps_outputs else None
        self._last = (output.outputs, kept, output.loss if is_here else None)
        if is_training and self.engine.batches_of_step < self.engine.gradient_accumulation:
            for hook in self.hooks:
                self.tell(hook)

    def tell(self, hook: BaseHook) -> None:
        """Calls a hook for the last batch of training."""
        self.uncounted = 1
        try:
            hook.after_train_iter(self.trainer, *self._last)
        finally:
            self.uncounted = 0

    def tell_of_test(self, hook: BaseHook) -> None:
        """Calls a hook for the last batch of an evaluation."""
        hook.after_test_iter(self.trainer, *self._last)
