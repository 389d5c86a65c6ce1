"""ColossalAI's `colossalai.engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

import pipeflow.training as native
from pipeflow.colossalai.engine.accumulation import next_batch
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.runtime.step import Output

__all__ = ["Engine"]


class Listener(Protocol):
    """An object that an engine calls for every batch."""

    def before_batch(self, *, is_training: bool) -> None:
        """Called before a batch."""

    def after_batch(self, output: Output, labels: object, *, is_training: bool) -> None:
        """Called after a batch, with its labels."""


class Engine(native.Engine):
    """pipeflow's Engine with ColossalAI's methods; `initialize` makes it.

    Attributes:
        listener: an object that is called for every batch, or None.
    """

    listener: Listener | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule of a batch."""
        return self.model.schedule

    @property
    def criterion(self) -> Callable[..., Tensor]:
        """`criterion(output, labels)` returns a batch's loss, for `backward`. Raises UsageError if there is none."""
        if self.model.runner.criterion is None:
            raise UsageError("this engine has no criterion: pass one to initialize")
        return self.model.runner.criterion

    @property
    def batches_of_step(self) -> int:
        """Number of batches run since the last step of the optimizer."""
        return self._batches

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Calls the model if this rank has the whole of it; otherwise raises UsageError."""
        if self.schedule.placement.num_ranks > 1:
            raise UsageError("this rank has only a part of the model: run batches with engine.execute_schedule")
        first, *others = self.model.runner.stages.values()
        output = first.call(*inputs, **named)
        for stage in others:
            output = stage.call(output)
        return output

    def execute(self, data_iter: Iterator[object], **options: Any) -> Output:
        """Like `execute` of pipeflow's Engine; iterators of a loader from `initialize` continue with the next epoch."""
        is_training = not options.get("forward_only", False)
        batch = next_batch(data_iter)
        if self.listener is not None:
            self.listener.before_batch(is_training=is_training)
        output = super().execute(data_iter if batch is None else iter([batch]), **options)
        if self.listener is not None:
            self.listener.after_batch(output, labels_of(batch), is_training=is_training)
        return output

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Tensor | None]:
        """Runs the next batch of `data_iter`. Returns outputs, labels and the mean loss on ranks with the last stage;
        each is None on other ranks, and if it is not asked for.

        Args:
            data_iter: iterator of batches `(inputs, labels)`.
            forward_only: evaluate, without gradients.
            return_loss: return the loss; must be True for training.
            return_output_label: return outputs and labels.

        Raises UsageError for training without return_loss, and as `execute` does.
        """
        if not forward_only and not return_loss:
            raise UsageError("return_loss=False needs forward_only=True: training computes the loss")
        batch = next_batch(data_iter)
        labels = labels_of(batch)
        if batch is not None:
            data_iter = iter([batch if return_loss else (batch[0], None)])
        output = self.execute(data_iter, forward_only=forward_only, return_outputs=return_output_label)
        if not has_last_stage(self):
            return None, None, None
        loss = output.loss if return_loss else None
        return (output.outputs, labels, loss) if return_output_label else (None, None, loss)


def has_last_stage(engine: native.Engine) -> bool:
    """True if this rank has the outputs."""
    placement = engine.model.schedule.placement
    return engine.model.context.pipeline_rank in placement.ranks_of(placement.num_stages - 1)


def labels_of(batch: Any) -> Any:
    """The labels of a batch `(inputs, labels)`; None for anything else, for which the step raises an error."""
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
