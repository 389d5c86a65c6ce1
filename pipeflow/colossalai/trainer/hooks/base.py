"""BaseHook: the base class of users' hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pipeflow.training as native
from pipeflow.runtime.step import Output
from pipeflow.training import Hook, Step

if TYPE_CHECKING:  # a trainer has them
    from pipeflow.colossalai.trainer.iterations import Iterations
    from pipeflow.colossalai.trainer.training import Trainer


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

    iterations: Iterations

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def attach(self, iterations: Iterations) -> None:
        """Attaches the hook to a trainer, before it trains or evaluates."""
        self.iterations = iterations
        told = {"train": "after_train_iter", "test": "after_test_iter"}
        wanted = {when for when, name in told.items() if getattr(type(self), name) is not getattr(BaseHook, name)}
        self.needs_outputs = frozenset(wanted) if iterations.keeps_outputs else frozenset()

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
        self.before_train(self.iterations.trainer)

    def before_epoch(self, trainer: native.Trainer) -> None:
        self.before_train_epoch(self.iterations.trainer)

    def before_step(self, trainer: native.Trainer) -> None:
        self.before_train_iter(self.iterations.trainer)

    def after_step(self, trainer: native.Trainer, step: Step) -> None:
        self.iterations.tell(self)

    def after_training(self, trainer: native.Trainer) -> None:
        self.after_train_epoch(self.iterations.trainer)

    def before_evaluation(self, trainer: native.Trainer) -> None:
        self.before_test(self.iterations.trainer)
        self.before_test_epoch(self.iterations.trainer)

    def after_batch(self, trainer: native.Trainer, output: Output, labels: object) -> None:
        self.iterations.tell_of_test(self)

    def after_evaluation(self, trainer: native.Trainer) -> None:
        self.after_test_epoch(self.iterations.trainer)
        self.after_test(self.iterations.trainer)

    def after_fit(self, trainer: native.Trainer) -> None:
        self.after_train(self.iterations.trainer)
