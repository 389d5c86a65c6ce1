"""execute_pipeline: one step of a Pipeline, as users call it. Must not contain: how a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.runtime.call import StepCall
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.runtime.step import Output


def execute_pipeline(
    data_iter: Iterator[object],
    model: Pipeline,
    *,
    forward_only: bool = False,
    return_outputs: bool = False,
    broadcast_loss: bool = False,
    trace: bool = False,
    reduce: bool = True,
    schedule: Schedule | None = None,
    gradient_scale: float = 1.0,
) -> Output:
    """Runs one step: takes a batch, runs the schedule, and adds the gradients of the batch's mean loss to `.grad`.

    Every rank makes the same call. All ranks of a replica must have the same batch in their iterators; the mean is over
    the batches of all replicas.

    Args:
        data_iter: iterator of `(inputs, labels)`. Tensors are split into microbatches along dim 0; entries wrapped in
            `pipeflow.Whole` are not split. A `pipeflow.Divided` batch has its microbatches, and may have the schedule
            that runs them. If `inputs` is a dict, each stage receives the entries that its `forward`
            has parameters for; otherwise `inputs` is the first stage's argument. If inputs require gradients, each rank
            adds the part of their gradients that its own stages compute.
        model: this rank's Pipeline.
        forward_only: evaluate only: no graph is built and no gradient changes. Labels may be None if no loss is needed.
            If a batch has fewer samples than the schedule has microbatches, each sample becomes a microbatch.
        return_outputs: return the last stage's outputs in `Output.outputs`.
        broadcast_loss: return the loss on every rank.
        trace: measure the step and return `Output.timeline`.
        reduce: average the gradients over the replicas. With False each replica accumulates its own gradients over
            several calls. The next call with True averages all of them.
        schedule: schedule of this step; by default that of the Pipeline. It must be sound and have the same placement;
            its number of microbatches may differ. Programs are compiled when a schedule is first used, separately for
            training and evaluation; the 16 most recently used ones are kept.
        gradient_scale: factor of the gradients of this call, but not of its loss, the same on every rank. With 1 / n,
            the sum over n calls is the gradient of their mean loss.

    Raises:
        UsageError: on the rank that noticed it, if a batch, a schedule, an output or a loss does not fit. On every
            rank, if the ranks made different calls.
        PipelineError: on every rank, if anything failed on any rank. The error names the rank where it began. Gradients
            are then undefined. The next step works again, unless a rank died.
    """
    if not isinstance(model, Pipeline):
        raise UsageError(f"execute_pipeline runs a pipeflow.Pipeline, got {type(model).__name__}")
    if not forward_only and not torch.is_grad_enabled():
        raise UsageError("gradients are disabled here: pass forward_only=True to evaluate")
    if schedule is not None:
        require_schedule(schedule)
    if not isfinite(gradient_scale):
        raise UsageError(f"gradient_scale must be a finite number, got {gradient_scale}")
    schedule = model.schedule if schedule is None else schedule
    call = StepCall(not forward_only, reduce, return_outputs, broadcast_loss, trace, schedule, gradient_scale)
    with model.alarm.raised_everywhere(call):
        return model.runner.step(data_iter, call, model.loss_scale)
