"""ColossalAI's `colossalai.engine.schedule`: pipeflow's schedules under its names, for this world's pipeline."""

from __future__ import annotations

from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.parallel.context import current_context
from pipeflow.schedules import make_schedule

__all__ = ["InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule"]

ELSEWHERE = {
    "tensor_shape": "write TENSOR_SHAPE into the configuration",
    "data_process_func": "write a forward that takes the batch's entries by name",
    "scatter_gather_tensors": "remove it; tensors between stages are sent whole",
}


def NonPipelineSchedule(**options: Any) -> Schedule:  # noqa: N802  # its name there
    """Returns the schedule with one rank and one microbatch. Raises UsageError for options."""
    _refuse(options)
    return make_schedule("1f1b", ranks=1, microbatches=1)


def PipelineSchedule(num_microbatches: int, **options: Any) -> Schedule:  # noqa: N802  # its name there
    """Returns the schedule 1f1b. Raises UsageError for options, and as make_schedule does."""
    _refuse(options)
    return make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=num_microbatches)


def InterleavedPipelineSchedule(  # noqa: N802  # its name there
    num_microbatches: int, num_model_chunks: int, **options: Any
) -> Schedule:
    """Returns the schedule interleaved-1f1b with `num_model_chunks` stages per rank. Raises UsageError for options, and
    as make_schedule does.
    """
    _refuse(options)
    ranks = current_context().pipeline_size
    return make_schedule("interleaved-1f1b", ranks=ranks, microbatches=num_microbatches, chunks=num_model_chunks)


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in ELSEWHERE:
            raise UsageError(f"a schedule has no option {name!r}: ColossalAI's options are {', '.join(ELSEWHERE)}")
        if value:
            raise UsageError(f"a schedule does not support {name} here: {ELSEWHERE[name]}")
