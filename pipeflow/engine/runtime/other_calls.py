"""Steps that are called otherwise than by `execute_pipeline`: with another forward than the module's own, with a
backward that is a call of its own, or with stages and a loss that the caller computes. Must not contain: the step
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.devices import outside, region_of
from pipeflow.engine.runtime.gradients.step_end import ParameterChange
from pipeflow.engine.runtime.microbatch import as_batch
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.runtime.weighing import Divisors
from pipeflow.engine.stages.criterion import own_loss
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.torch_private.tensors import foreach_mul_


@contextmanager
def computing(
    model: Pipeline,
    forward: Callable[..., Any],
    weigh: Callable[..., float] | None = None,
    *,
    has_loss: bool = True,
) -> Iterator[None]:
    """Inside the `with` block, steps run `forward(module, **entries)` in place of the module's own forward.

    Args:
        model: a Pipeline of a cut module.
        forward: function that calls `module`, once, and returns its loss, or a tuple that starts with it. `module` is a
            stage's copy of the whole module, whose own forward it has during the call. Equal functions share plans.
        weigh: as in `Pipeline`.
        has_loss: False for a forward without a loss, for evaluations.

    Cuts, parameters and their owners stay as they are. Raises UsageError for a Pipeline of chunks; a step raises it for
    a forward that cannot be cut where the module was.
    """
    stages = _stages(model)
    runner, planner = model.runner, stages[0].planner

    def _with_labels(batch: object) -> tuple[dict[str, Any], object]:
        """A batch without labels has a loss all the same."""
        entries, labels = planner.entries.of(batch)
        return entries, next(iter(entries.values())) if labels is None else labels

    before = runner.read, runner.criterion, runner.weigh
    with planner.computing(forward, [stage.root for stage in stages]):
        runner.read = _with_labels if has_loss else planner.entries.of
        runner.criterion, runner.weigh = own_loss, weigh
        try:
            yield
        finally:
            runner.read, runner.criterion, runner.weigh = before


def adds(model: Pipeline, batch: object) -> bool:
    """Returns True if the loss of the forward that runs now is a sum, divided by nothing that depends on the samples of
    the first microbatch of `batch`. Raises UsageError if it is not known what it is divided by.
    """
    stage = _stages(model)[-1]
    made = as_batch(batch, model.schedule.num_microbatches, model.context.device, stage.planner.entries.of)
    form = Divisors(own_loss, stage, model.context).form(made, made.split(made.inputs), made.split(made.labels))
    return not form.totals and all(term.adds for term in form.terms)


def _stages(model: Pipeline) -> list[ModuleStage]:
    stages = [chunk for chunk in model.chunks if isinstance(chunk, ModuleStage)]
    if len(stages) < len(model.chunks):
        raise UsageError("only a Pipeline made by from_module can run another forward: this one was made from chunks")
    return stages


class HeldStep:
    """A step that has run, and whose gradients `loss.backward()` adds to `.grad`.

    Args:
        held: the gradients of the step, times `scale`, by parameter.
        loss: the mean loss of its batch, a scalar tensor without a graph.
        scale: factor that the gradients have already.
        outputs: the last stage's outputs, as in `Output`.

    Attributes:
        outputs: as given.
        loss: the same number, with a graph that leads to the gradients. A loss computed from it, such as `loss / 2`,
            scales them.
        is_released: True once they are in `.grad`.
    """

    def __init__(
        self, held: list[tuple[nn.Parameter, Tensor]], loss: Tensor, scale: float, outputs: object = None
    ) -> None:
        self._held = held
        self.outputs = outputs
        self._scale = scale
        self.is_released = False
        anchor = torch.zeros((), requires_grad=True, device=loss.device)
        with torch.enable_grad():
            self.loss: Tensor = _Releasing.apply(anchor, loss, self)  # type: ignore[no-untyped-call]  # torch's

    def release(self, factor: float | Tensor = 1.0) -> None:
        """Adds the gradients, times `factor`, to `.grad`. Raises UsageError if it was called before."""
        if self.is_released:
            raise UsageError("the backward of this step's loss was called before: call it once for each batch")
        self.is_released = True
        gradients = [gradient for _, gradient in self._held]
        if gradients and (isinstance(factor, Tensor) or factor != 1.0):
            foreach_mul_(gradients, factor)
        for parameter, gradient in self._held:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []


class _Releasing(torch.autograd.Function):
    """The loss of a step that has run; its backward releases the gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, step: HeldStep) -> Tensor:
        ctx.step = step
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.step.release(gradients[0] / ctx.step._scale)  # of what the caller differentiates
        return None, None, None


def held_step(
    data_iter: Iterator[object],
    model: Pipeline,
    *,
    schedule: Schedule | None = None,
    gradient_scale: float = 1.0,
    return_outputs: bool = False,
) -> HeldStep:
    """Runs one training step like `execute_pipeline`, and holds its gradients back: `.grad` is as before, until the
    backward of `HeldStep.loss`, or `release`. The loss is known on every rank.

    Args:
        data_iter, model, schedule, return_outputs: as in `execute_pipeline`.
        gradient_scale: factor that the gradients get within the step, where it costs nothing: pass the one that
            the gradient of the loss will have. `release()` then adds them as they are.

    Raises the errors of `execute_pipeline`.
    """
    earlier = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in earlier:
        parameter.grad = None
    try:
        output = execute_pipeline(
            data_iter,
            model,
            broadcast_loss=True,
            schedule=schedule,
            gradient_scale=gradient_scale,
            return_outputs=return_outputs,
        )
        held = [(parameter, parameter.grad) for parameter, _ in earlier if parameter.grad is not None]
    finally:
        for parameter, gradient in earlier:
            parameter.grad = gradient
    assert output.loss is not None, "it was broadcast"
    return HeldStep(held, output.loss, gradient_scale, output.outputs)


def backward(loss: Tensor, model: Pipeline, *, reduce: bool = True, gradient_scale: float = 1.0) -> None:
    """Adds the gradients of `loss` to `.grad`, like `execute_pipeline`, if one rank has all stages and has called them
    itself.

    All ranks of the world call it together, each with the mean loss of its own samples. All replicas have the same
    weight.

    Args:
        loss: a scalar tensor computed from `model.chunks`.
        model: the Pipeline.
        reduce, gradient_scale: as in `execute_pipeline`.

    Raises UsageError if the pipeline has several ranks, and PipelineError like `execute_pipeline`.
    """
    with model.alarm.raised_everywhere():
        placement, gradients = model.schedule.placement, model.gradients
        if placement.num_ranks > 1:
            raise UsageError(
                f"this rank has a part of the model only, since its pipeline has {placement.num_ranks} ranks: "
                "train it with execute_pipeline"
            )
        gradients.prepare()
        gradients.begin([placement.stages_of(0)])
        with outside(region_of(model.context.device.type)):
            (loss * (model.loss_scale * gradient_scale)).backward()
        gradients.end(reduce=reduce)
        rows = all_gather(model.context.world, [gradients.change, gradients.buffers.are_changed])
        change = ParameterChange(int(max(row[0] for row in rows)))
        model.runner.renew(change, buffers=any(row[1] for row in rows), reduce=reduce)
