"""backward: the gradients of a loss that the caller computed by calling the stages itself. Must not contain: the step
of a schedule.
"""

from __future__ import annotations

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.autocast import outside, region_of
from pipeflow.runtime.gradients.step_end import ParameterChange
from pipeflow.runtime.pipeline import Pipeline


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
        if any(row[1] for row in rows):
            gradients.buffers.share()
        if change:
            gradients.renew(change, reduce=reduce)
            for stage in model.runner.stages.values():
                stage.defer()
