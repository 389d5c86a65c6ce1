"""Arguments: checks the arguments of a Pipeline. A rank's chunks must fit the schedule, and all ranks must have been
given the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from pipeflow.core.errors import UsageError
from pipeflow.core.route import Routes, routes_among
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.runtime import grid_samples
from pipeflow.engine.runtime.program.compile import Options, digest_of, require_sound
from pipeflow.engine.runtime.program.slots import Promise
from pipeflow.engine.runtime.sharing import CONTEXT
from pipeflow.engine.stages.stage import ModuleStage


def arguments_of(schedule: Schedule, options: Options, head_slices: int | None) -> dict[str, object]:
    """The arguments of this rank that must be the same on all ranks, by their names for users."""
    promise = options.promise
    return {
        "schedule": (schedule.name, schedule.placement, schedule.num_microbatches, digest_of(schedule)),
        "tensor_shape or tensor_dtype": None if promise is None else (promise.shape, promise.dtype),
        "cost": repr(options.cost),
        "overlap": options.overlap is not None,
        "routes": options.routes,
        "graph": options.graph,
        "head_slices": head_slices,
    }


def compare(everyone: Sequence[dict[str, object]]) -> None:
    """Raises the same UsageError on every rank unless all ranks were given the same arguments."""
    for called, first in everyone[0].items():
        for rank, arguments in enumerate(everyone):
            if (its := arguments[called]) != first:
                raise UsageError(f"rank {rank} was given another {called} than rank 0: {its}, not {first}")


def promised(shape: Sequence[int | None] | None, dtype: torch.dtype) -> Promise | None:
    """The promised shape and dtype of activations; None if `shape` is None. Raises UsageError if an entry other than
    the first is None.
    """
    if shape is None:
        return None
    if None in shape[1:]:
        raise UsageError(f"only the first entry of tensor_shape, the microbatch's size, may be None, got {shape}")
    return Promise(tuple(shape), dtype)


def routed(
    chunks: nn.ModuleList, routes: Iterable[tuple[int, int]] | None, schedule: Schedule, promise: Promise | None
) -> Routes:
    """The routes of a pipeline: those given, or those with which its stages were planned.

    Raises UsageError for a pair that is no route, and if there are routes although `tensor_shape` was given.
    """
    if routes is None:
        routes = next((chunk.routes for chunk in chunks if isinstance(chunk, ModuleStage)), ())
    found = routes_among(schedule.placement.num_stages, routes)
    if found and promise is not None:
        raise UsageError(
            "tensor_shape is the shape between neighbouring stages, and does not fit routes: leave it None, so that "
            "shapes are sent along in headers"
        )
    return found


def require_ranks(schedule: Schedule, context: Context) -> None:
    """Raises UsageError for a schedule of another number of ranks than the pipeline has."""
    ranks, has = schedule.placement.num_ranks, context.pipeline_size
    if ranks != has:
        start = f"start {ranks} process{'es' * (ranks > 1)}: torchrun --nproc-per-node {ranks}"
        advice = start if context.world_size == 1 else f"{start}, or make it with ranks={has}"
        raise UsageError(
            f"schedule {schedule.name!r} is for {ranks} rank{'s' * (ranks > 1)}, the pipeline has {has}; {advice}"
        )


def fitting_stages(
    chunks: nn.ModuleList, schedule: Schedule, context: Context, stages: Sequence[int] | None
) -> tuple[int, ...]:
    """The stages that this rank holds. Raises UsageError if schedule, ranks and chunks do not fit."""
    rank = context.pipeline_rank
    require_ranks(schedule, context)
    require_sound(schedule, schedule.placement)
    own = schedule.placement.stages_of(rank)
    there = f"rank {rank} holds stages {list(own)} under {schedule.name!r}"
    if len(chunks) != len(own):
        raise UsageError(f"{there}: it needs {len(own)} chunks, got {len(chunks)}")
    if stages is not None and tuple(stages) != own:
        raise UsageError(f"{there}; its chunks are for stages {list(stages)}")
    if any(isinstance(module, DistributedDataParallel) for module in chunks.modules()):
        raise UsageError("DistributedDataParallel inside a stage would average gradients at the wrong time: unwrap it")
    if lazy := [name for name, parameter in chunks.named_parameters() if is_lazy(parameter)]:
        raise UsageError(f"{lazy[0]} has no shape yet: run the lazy layers of a stage once before making the Pipeline")
    if context.context_size > 1:
        CONTEXT.require_stages(chunks)
    if context.layout.sample_parts > 1:
        grid_samples.require_stages(chunks, context.layout)
    return own
