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
    """Is told of every batch that an engine runs."""

    def before_batch(self, *, is_training: bool) -> None:
        """Before it."""

    def after_batch(self, output: Output, labels: object, *, is_training: bool) -> None:
        """After it, with the labels that it came with."""


class Engine(native.Engine):
    """An Engine of pipeflow's that speaks of schedules. `initialize` makes it.

    Attributes:
        listener: is told of every batch, unless None.
    """

    listener: Listener | None = None

    @property
    def schedule(self) -> Schedule:
        """What runs a batch."""
        return self.model.schedule

    @property
    def criterion(self) -> Callable[..., Tensor]:
        """`criterion(output, labels)` is the loss of a batch, as `backward` takes it. Raises UsageError without one."""
        if self.model.runner.criterion is None:
            raise UsageError("this engine has no criterion: give one to initialize")
        return self.model.runner.criterion

    @property
    def batches_of_step(self) -> int:
        """How many were run since the last step of the optimizer."""
        return self._batches

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's output, where this rank has the whole model. Raises UsageError elsewhere."""
        if self.schedule.placement.num_ranks > 1:
            raise UsageError("this rank has a part of the model only: run batches with engine.execute_schedule")
        first, *others = self.model.runner.stages.values()
        output = first.call(*inputs, **named)
        for stage in others:
            output = stage.call(output)
        return output

    def execute(self, data_iter: Iterator[object], **options: Any) -> Output:
        """As of pipeflow's Engine; iterators of a loader that `initialize` returned go on with the next epoch."""
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
        """Runs the next batch of `data_iter`. Returns the outputs, the labels and the mean loss where the last stage
        is, and None for each elsewhere and for what was not asked for.

        Raises UsageError for training without return_loss, and as `execute`.
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
    """Whether this rank has the outputs."""
    placement = engine.model.schedule.placement
    return engine.model.context.pipeline_rank in placement.ranks_of(placement.num_stages - 1)


def labels_of(batch: Any) -> Any:
    """Those of a batch that is `(inputs, labels)`; of anything else None, which the step refuses."""
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
