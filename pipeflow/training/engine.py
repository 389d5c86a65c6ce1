"""Engine: a model, what steps it, and how one step of training is taken. What must not live here: loops over epochs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.optim.clip import clip_grad_norm_
from pipeflow.optim.optimizer import Wrapper, require_parameters_of
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.backward import backward
from pipeflow.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.runtime.step import Output

LOG = logging.getLogger("pipeflow")


class Scheduler(Protocol):
    """A scheduler of the learning rate, such as torch's."""

    def step(self) -> None:
        """Takes the next rate."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from there."""


class NonFiniteLossError(PipeflowError, ArithmeticError):
    """A batch whose loss is infinite or not a number; raised on every rank.

    Attributes:
        step: how many steps were taken before.
        microbatch: the first one with such a loss; None where each is finite and their sum is not.
    """

    def __init__(self, loss: float, step: int, microbatch: int | None) -> None:
        where = "" if microbatch is None else f", first in microbatch {microbatch}"
        super().__init__(
            f"the loss is {loss} in step {step}{where}: look at its data, lower the learning rate, clip gradients, or "
            "leave such steps out with Engine(non_finite='skip'). Nothing was changed by this step"
        )
        self.step = step
        self.microbatch = microbatch


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of the optimizer was like.

    Attributes:
        batches: the Output of each batch that it accumulated.
        is_taken: whether the optimizer changed the weights; it does not where a gradient overflowed, or the loss was
            not finite.
        grad_norm: before clipping, a float64 scalar; None where gradients are not clipped.
    """

    batches: tuple[Output, ...]
    is_taken: bool
    grad_norm: Tensor | None

    @property
    def loss(self) -> Tensor:
        """The mean of the batches' losses, a scalar, on every rank."""
        return torch.stack([_told(output) for output in self.batches]).mean()

    @property
    def samples(self) -> int:
        """Of all batches and replicas."""
        return sum(output.samples for output in self.batches)

    @property
    def timeline(self) -> Timeline | None:
        """That of the last batch, where it was traced."""
        return self.batches[-1].timeline


class Engine:
    """Takes steps of training: runs batches through a Pipeline, accumulates and clips gradients, steps the optimizer
    and the learning rate. All ranks make the same calls.

    `train_step` is one whole step. The same in pieces, once for each batch, whatever is accumulated:

        engine.zero_grad()
        engine.execute(batches)
        engine.step()

    Args:
        model: this rank's Pipeline.
        optimizer: made from the model's parameters; also a Zero, a MasterWeights or a Lamb.
        scheduler: of the learning rate; it takes a step after each of the optimizer's.
        gradient_accumulation: batches per step of the optimizer. The gradient is that of their mean loss.
        clip_grad_norm: the largest norm of the whole model's gradient; 0 for no clipping.
        non_finite: what to do where a batch's loss is infinite or not a number: "stop" with a NonFiniteLossError, or
            "skip" the step that it is a part of.

    Attributes:
        steps: how many were taken, the skipped ones too.
        skipped: how many were skipped because of their loss.

    Raises UsageError for a model or an optimizer of another type, an optimizer of other parameters, and numbers that
    cannot work.
    """

    def __init__(
        self,
        model: Pipeline,
        optimizer: Optimizer,
        *,
        scheduler: Scheduler | None = None,
        gradient_accumulation: int = 1,
        clip_grad_norm: float = 0.0,
        non_finite: Literal["stop", "skip"] = "stop",
    ) -> None:
        if not isinstance(model, Pipeline):
            raise UsageError(f"an Engine trains a pipeflow.Pipeline, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        require_parameters_of(model, optimizer)
        if gradient_accumulation < 1:
            raise UsageError(f"gradient_accumulation must be at least 1, got {gradient_accumulation}")
        if not clip_grad_norm >= 0:
            raise UsageError(f"clip_grad_norm must be positive, or 0 for no clipping, got {clip_grad_norm}")
        if non_finite not in ("stop", "skip"):
            raise UsageError(f"non_finite must be 'stop' or 'skip', got {non_finite!r}")
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
        self._is_spoiled = False  # by one of them

    def train(self, mode: bool = True) -> None:
        """Puts the model into training mode, or with `mode=False` into that of evaluation."""
        self.model.train(mode)

    def eval(self) -> None:
        """Puts the model into the mode of evaluation."""
        self.train(False)

    def train_step(self, data_iter: Iterator[object], *, return_outputs: bool = False, trace: bool = False) -> Step:
        """One step of everything: `gradient_accumulation` batches, clipping, the optimizer and the learning rate.

        Args:
            data_iter, return_outputs: as `execute_pipeline` takes them.
            trace: measure the last batch.

        Raises NonFiniteLossError, and as `execute_pipeline`.
        """
        self.zero_grad()
        last = self.gradient_accumulation - 1
        batches = [
            self.execute(data_iter, return_outputs=return_outputs, trace=trace and index == last)
            for index in range(self.gradient_accumulation)
        ]
        is_taken = self.step()
        return Step(tuple(batches), is_taken, self.grad_norm)

    def execute(
        self,
        data_iter: Iterator[object],
        *,
        forward_only: bool = False,
        return_outputs: bool = False,
        trace: bool = False,
        schedule: Schedule | None = None,
    ) -> Output:
        """Runs one batch, as `execute_pipeline` does; every rank is told the loss. Gradients are averaged over the
        replicas with the last batch of a step. Raises as `train_step`, and UsageError where `step` is due.
        """
        if forward_only:
            return execute_pipeline(
                data_iter,
                self.model,
                forward_only=True,
                return_outputs=return_outputs,
                broadcast_loss=True,
                trace=trace,
                schedule=schedule,
            )
        output = execute_pipeline(
            data_iter,
            self.model,
            return_outputs=return_outputs,
            broadcast_loss=True,
            trace=trace,
            reduce=self._is_last_batch(),
            schedule=schedule,
            gradient_scale=1 / self.gradient_accumulation,
        )
        self._count(_told(output), output)
        return output

    def backward(self, loss: Tensor) -> None:
        """The gradients of the mean loss of one batch, where this rank has the whole model and called it itself.
        Raises as `execute`.
        """
        backward(loss, self.model, reduce=self._is_last_batch(), gradient_scale=1 / self.gradient_accumulation)
        self._batches += 1

    def zero_grad(self) -> None:
        """Clears the gradients before the first batch of a step; before the others it keeps them."""
        if not self._batches:
            self.optimizer.zero_grad()

    def step(self) -> bool:
        """After the last batch of a step: clips the gradients, steps the optimizer, then the learning rate. After the
        others it does nothing. Returns whether the optimizer changed the weights.

        Raises UsageError where no batch was run since the last step, PipelineError as `execute_pipeline` does.
        """
        if not self._batches:
            raise UsageError("there is nothing to step: run a batch first, with execute or backward")
        if self._batches < self.gradient_accumulation:
            return False
        is_spoiled = self._is_spoiled
        self.forget_batches()
        self.steps += 1
        if is_spoiled:
            self.skipped += 1
            self.optimizer.zero_grad()
            return False
        self.grad_norm = clip_grad_norm_(self.model, self.clip_grad_norm) if self.clip_grad_norm else None
        self.optimizer.step()
        is_taken = not (isinstance(self.optimizer, Wrapper) and self.optimizer.step_was_skipped)
        if is_taken and self.scheduler is not None:
            self.scheduler.step()
        return is_taken

    def forget_batches(self) -> None:
        """Begins the next step anew: batches that were run since the last one no longer count. `zero_grad` clears
        their gradients.
        """
        self._batches, self._is_spoiled = 0, False

    def _is_last_batch(self) -> bool:
        if self._batches == self.gradient_accumulation:
            raise UsageError(f"{self._batches} batches were run since the last step: call step() after each of them")
        return self._batches == self.gradient_accumulation - 1

    def _count(self, loss: Tensor, output: Output) -> None:
        self._batches += 1
        if bool(loss.isfinite()):
            return
        context = self.model.context
        spoiled = [microbatch for microbatch, each in output.losses.items() if not bool(each.isfinite())]
        with context.alarm.raised_everywhere():
            [first] = min(all_gather(context.world, [min(spoiled, default=math.inf)]))
        error = NonFiniteLossError(float(loss), self.steps, int(first) if math.isfinite(first) else None)
        if self.non_finite == "stop":
            self.forget_batches()
            self.optimizer.zero_grad()
            raise error
        self._is_spoiled = True
        if context.rank == 0:
            where = "" if error.microbatch is None else f", first in microbatch {error.microbatch}"
            LOG.warning("the loss is %g in step %d%s: the step is skipped", float(loss), self.steps, where)


def _told(output: Output) -> Tensor:
    assert output.loss is not None  # it is broadcast
    return output.loss
