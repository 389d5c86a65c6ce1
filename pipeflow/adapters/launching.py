"""The context of a script of another library, which may have launched it before; and what the script says of its
pipeline. Must not contain: names of a library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context, context_if_launched
from pipeflow.engine.parallel.launcher import launch
from pipeflow.engine.runtime.step import LossOver
from pipeflow.engine.stages.blocks import Blocks, Cuts
from pipeflow.schedules.registry import make_schedule


def launched(
    pipeline: int | None,
    tensor: int | None,
    data: int | None = None,
    *,
    device: torch.device | str | None = None,
    instead: str = "pass the same sizes to pipeflow.launch",
) -> Context:
    """The context, launched here unless it was before.

    Args:
        pipeline, tensor, data: the sizes that it must have; None for any.
        device: as in `launch`.
        instead: what to do if it has others.

    Raises UsageError if it has other sizes.
    """
    context = context_if_launched() or launch(pipeline, tensor or 1, device=device)
    here = context.data_size, context.pipeline_size, context.tensor_size
    wanted = tuple(size if asked is None else asked for asked, size in zip((data, pipeline, tensor), here, strict=True))
    if wanted != here:
        raise UsageError(
            f"the {context.world_size} processes are launched as {here[0]} replicas of {here[1]} pipeline ranks with "
            f"{here[2]} tensor ranks, but there are to be {wanted[0]}, {wanted[1]} and {wanted[2]}: start as many "
            f"processes as their product, and {instead}"
        )
    return context


@dataclass(frozen=True)
class CutSettings:
    """How a model is cut and run.

    Attributes:
        schedule: the schedule of its steps.
        options: further arguments of `Pipeline.from_module`.
        gradient_scale: function that returns the factor that the library gives to the gradients of a loss: one over the
            number of accumulated batches.
    """

    schedule: Schedule
    options: Mapping[str, Any]
    gradient_scale: Callable[[], float]


@dataclass(frozen=True)
class PipelineOptions:
    """What a script says of its pipeline.

    Attributes:
        schedule: name of the schedule, as in `pipeflow.make_schedule`.
        microbatches: number of microbatches in a batch.
        schedule_options: further arguments of `pipeflow.make_schedule`.
        cuts, blocks: where the model is cut, as in `Pipeline.from_module`.
        weigh, loss_over: as in `Pipeline`.
    """

    schedule: str
    microbatches: int
    schedule_options: Mapping[str, Any] | None
    cuts: Cuts
    blocks: Blocks
    weigh: Callable[..., float] | None
    loss_over: LossOver

    def made_for(self, context: Context) -> Schedule:
        """The schedule for the ranks of a pipeline."""
        options = {"microbatches": self.microbatches, **(self.schedule_options or {})}
        return make_schedule(self.schedule, ranks=context.pipeline_size, **options)

    def settings(
        self, context: Context, autocast: torch.dtype | None, gradient_scale: Callable[[], float] = lambda: 1.0
    ) -> CutSettings:
        """The settings of a model that is run under `autocast`."""
        cut = {"cuts": self.cuts, "blocks": self.blocks, "weigh": self.weigh, "loss_over": self.loss_over}
        return CutSettings(self.made_for(context), {**cut, "autocast": autocast}, gradient_scale)
