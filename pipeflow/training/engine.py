"""Engine: takes one training step with a Pipeline and an optimizer. Must not contain: loops over epochs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeflow.core.errors import NonFiniteError, NonFiniteGradientError, UsageError
from pipeflow.core.placement import require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.other_calls import backward
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.runtime.step import Output
from pipeflow.training.optim.clip import clip_grad_norm_, require_checks
from pipeflow.training.optim.optimizer import Wrapper, require_no_closure, require_parameters_of
from pipeflow.training.optim.precision import MasterWeights
from pipeflow.training.optim.rates import Scheduler


class NonFiniteLossError(NonFiniteError):
    """The loss of a batch is infinite or NaN.

    Args:
        loss: the loss.
        step: number of steps taken before this one.
        microbatch: index of the first microbatch with such a loss; None if only the sum of the losses is not finite.

    `step` and `microbatch` are attributes, too.
    """

    def __init__(self, loss: float, step: int, microbatch: int | None) -> None:
        where = "" if microbatch is None else f", first in microbatch {microbatch}"
        advice = "look at its data, lower the learning rate, clip gradients"
        super().__init__(f"the loss is {loss} in step {step}{where}", advice, step)
        self.microbatch = microbatch


def check_finite(
    outputs: Sequence[Output], norm: Tensor | None, step: int, context: Context
) -> tuple[float | None, NonFiniteError | None]:
    """Reads the losses of a step's batches and the `norm` of its gradient, all at once. Returns the mean loss, None
    without batches, and the error that names the first number that is not finite, the same on all ranks.
    """
    losses = [_broadcast_loss(output) for output in outputs]
    numbers = [*losses, *([mean_loss(outputs)] if losses else []), *([] if norm is None else [norm])]
    read: list[float] = torch.stack([number.double() for number in numbers]).tolist() if numbers else []
    mean = read[len(losses)] if losses else None
    for output, loss in zip(outputs, read, strict=False):
        if not math.isfinite(loss):
            return mean, NonFiniteLossError(loss, step, _first_spoiled(output, context))
    return mean, None if all(map(math.isfinite, read)) else NonFiniteGradientError(step)


def mean_loss(outputs: Sequence[Output]) -> Tensor:
    """The mean of the losses of batches, a scalar."""
    return torch.stack([_broadcast_loss(output) for output in outputs]).mean()


def _broadcast_loss(output: Output) -> Tensor:
    assert output.loss is not None  # the Engine broadcasts it
    return output.loss


def _first_spoiled(output: Output, context: Context) -> int | None:
    """The first microbatch on any rank whose loss is not finite."""
    spoiled = [microbatch for microbatch, each in output.losses.items() if not bool(each.isfinite())]
    with context.alarm.raised_everywhere():
        [first] = min(all_gather(context.world, [min(spoiled, default=math.inf)]))
    return int(first) if math.isfinite(first) else None


LOG = logging.getLogger("pipeflow")


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one optimizer step.

    Attributes:
        batches: the Output of each accumulated batch.
        is_taken: True if the optimizer changed the weights; False if a gradient overflowed or the loss was not finite.
        grad_norm: norm of the gradient before clipping, a float64 scalar; None without clipping.
        read_loss: `loss` as a number, if the Engine has read it; None with `non_finite="ignore"`.
    """

    batches: tuple[Output, ...]
    is_taken: bool
    grad_norm: Tensor | None
    read_loss: float | None = None

    @property
    def loss(self) -> Tensor:
        """Mean loss of the batches, a scalar, the same on every rank."""
        return mean_loss(self.batches)

    @property
    def samples(self) -> int:
        """Number of samples in all batches, over all replicas."""
        return sum(output.samples for output in self.batches)

    @property
    def weight(self) -> float:
        """Weight of all batches in the mean loss of an epoch; see `Output.weight`."""
        return sum(output.weight for output in self.batches)

    @property
    def timeline(self) -> Timeline | None:
        """Measured timeline of the last batch; None if it was not traced."""
        return self.batches[-1].timeline


class Engine:
    """Runs training steps: sends batches through a Pipeline, accumulates and clips gradients, steps the optimizer and
    the learning rate. All ranks make the same calls.

    `train_step` takes one whole step. The same step in pieces, called once for each batch::

        engine.zero_grad()
        engine.execute(batches)
        engine.step()  # does nothing before the last batch

    Args:
        model: this rank's Pipeline.
        optimizer: an optimizer of the model's parameters: one of torch's or of another library, a Lamb, or a Zero or a
            MasterWeights of one. It must step each weight by itself; LBFGS does not.
        scheduler: learning-rate scheduler; it steps after each step of the optimizer that changed the weights.
        gradient_accumulation: number of batches per optimizer step. The gradient is that of their mean loss.
        clip_grad_norm: maximum norm of the whole model's gradient; 0 disables clipping.
        non_finite: what to do if a batch's loss is infinite or NaN: "stop" raises NonFiniteLossError, "skip" skips the
            step that the batch belongs to. With clip_grad_norm the same holds for the gradient of a step: "stop" raises
            NonFiniteGradientError. A LossScaler skips steps whose gradient overflows in either case. `step` reads these
            numbers before it changes anything, so the host waits for the device once per step. With "ignore" nothing is
            checked, and the host does not wait.

    Attributes:
        steps: number of steps so far, including skipped ones.
        skipped: number of steps skipped because of their loss or their gradient.
        grad_norm: norm of the gradient before clipping in the last step; None without clipping.

    Raises UsageError for a model or an optimizer of another type, for an optimizer of other parameters or whose step
    needs a closure, and for numbers out of range.
    """

    def __init__(
        self,
        model: Pipeline,
        optimizer: Optimizer,
        *,
        scheduler: Scheduler | None = None,
        gradient_accumulation: int = 1,
        clip_grad_norm: float = 0.0,
        non_finite: Literal["stop", "skip", "ignore"] = "stop",
    ) -> None:
        if not isinstance(model, Pipeline):
            made = "write Engine(model, optimizer), and make the model with Pipeline.from_module"
            raise UsageError(f"an Engine trains a pipeflow.Pipeline, got {type(model).__name__}: {made}")
        require_parameters_of(model, optimizer)
        require_no_closure(optimizer)
        require_positive(gradient_accumulation=gradient_accumulation)
        require_checks(clip_grad_norm, non_finite)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.gradient_accumulation = gradient_accumulation
        self.clip_grad_norm = clip_grad_norm
        self.non_finite = non_finite
        self.steps = 0
        self.skipped = 0
        self.grad_norm: Tensor | None = None
        self._batches = 0  # since the last step
        self._outputs: list[Output] = []  # of these batches
        self._read_loss: float | None = None  # of the last step

    def train(self, mode: bool = True) -> None:
        """Puts the model in training mode, or with `mode=False` in evaluation mode."""
        self.model.train(mode)

    def eval(self) -> None:
        """Puts the model in evaluation mode."""
        self.train(False)

    def train_step(self, data_iter: Iterator[object], *, return_outputs: bool = False, trace: bool = False) -> Step:
        """Takes one whole step: runs `gradient_accumulation` batches, clips gradients, steps the optimizer and the
        learning rate.

        Args:
            data_iter, return_outputs: as in `execute_pipeline`.
            trace: measure the timeline of the last batch.

        Raises NonFiniteLossError, NonFiniteGradientError, and the errors of `execute_pipeline`.
        """
        self.zero_grad()
        last = self.gradient_accumulation - 1
        batches = [
            self.execute(data_iter, return_outputs=return_outputs, trace=trace and index == last)
            for index in range(self.gradient_accumulation)
        ]
        is_taken = self.step()
        return Step(tuple(batches), is_taken, self.grad_norm, self._read_loss)

    def execute(
        self,
        data_iter: Iterator[object],
        *,
        forward_only: bool = False,
        return_outputs: bool = False,
        trace: bool = False,
        schedule: Schedule | None = None,
    ) -> Output:
        """Runs one batch with `execute_pipeline`; every rank receives the loss. The last batch of a step averages the
        gradients over the replicas. Raises the errors of `execute_pipeline`, and UsageError if `step` must be called
        first. After an error the step starts again: its earlier batches no longer count.
        """
        run = partial(
            execute_pipeline,
            data_iter,
            self.model,
            return_outputs=return_outputs,
            broadcast_loss=True,
            trace=trace,
            schedule=schedule,
        )
        if forward_only:
            return run(forward_only=True)
        if self.model.runner.confirmation.stepper is not None:
            raise UsageError(
                "an Engine steps the optimizer itself, but the Pipeline has a PipelinedOptimizer: call "
                "execute_pipeline in a loop of your own, or make a Pipeline without one"
            )
        context = self.model.context
        with self._batch() as is_last:
            output = run(reduce=is_last or context.elastic, gradient_scale=1 / self.gradient_accumulation)
        self._outputs.append(output)
        return output

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of one batch's mean loss, computed by calling the stages of a one-rank pipeline by hand.
        Raises UsageError if the pipeline has several ranks or `step` must be called first, and PipelineError as
        `execute_pipeline` does.
        """
        with self._batch() as is_last:
            backward(loss, self.model, reduce=is_last, gradient_scale=1 / self.gradient_accumulation)

    def zero_grad(self) -> None:
        """Clears the gradients before the first batch of a step; keeps them before the other batches."""
        if not self._batches:
            self.optimizer.zero_grad()

    def step(self) -> bool:
        """After the last batch of a step, clips the gradients, steps the optimizer, then the learning rate. After the
        other batches it does nothing. Returns True if the optimizer changed the weights.

        Raises UsageError if no batch was run since the last step, NonFiniteLossError, NonFiniteGradientError, and
        PipelineError as `execute_pipeline` does.
        """
        if not self._batches:
            raise UsageError("there is nothing to step: run a batch first, with execute or backward")
        if self._batches < self.gradient_accumulation:
            return False
        outputs = self._outputs
        self.forget_batches()
        scales = isinstance(self.optimizer, MasterWeights) and self.optimizer.scaler is not None
        measures = scales or self.clip_grad_norm > 0
        norm = clip_grad_norm_(self.model, self.clip_grad_norm or math.inf) if measures else None
        self.grad_norm = norm if self.clip_grad_norm else None
        error = self._check_finite(outputs, norm)
        overflows = scales and isinstance(error, NonFiniteGradientError)
        if overflows:  # the optimizer skips the step
            error = None
        if error is not None and self.non_finite == "stop":
            self.optimizer.zero_grad()
            raise error
        self.steps += 1
        if error is not None:
            if self.model.context.rank == 0:
                LOG.warning("%s: the step is skipped", error.what)
            self.skipped += 1
            self.optimizer.zero_grad()
            return False
        self.optimizer.step()
        is_taken = not overflows
        if self.non_finite == "ignore" and isinstance(self.optimizer, Wrapper):
            is_taken = not self.optimizer.step_was_skipped
        if is_taken and self.scheduler is not None:
            self.scheduler.step()
        return is_taken

    def _check_finite(self, outputs: Sequence[Output], norm: Tensor | None) -> NonFiniteError | None:
        self._read_loss = None
        if self.non_finite == "ignore":
            return None
        self._read_loss, error = check_finite(outputs, norm, self.steps, self.model.context)
        return error

    def forget_batches(self) -> None:
        """Starts the current step again: batches run since the last step no longer count. The next `zero_grad` clears
        their gradients.
        """
        self._batches, self._outputs = 0, []

    @contextmanager
    def _batch(self) -> Iterator[bool]:
        """A region that runs a batch; yields True if it is the last one of the step. An error inside it makes the step
        start again, because the gradients are then undefined.
        """
        if self._batches == self.gradient_accumulation:
            raise UsageError(f"{self._batches} batches were run since the last step: call step() after each of them")
        try:
            yield self._batches == self.gradient_accumulation - 1
        except BaseException:
            self.forget_batches()
            raise
        self._batches += 1
