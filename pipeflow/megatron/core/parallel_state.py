"""Megatron-LM's `megatron.core.parallel_state`: how the processes are laid out, a face of `launch` and its Context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context, current_context, is_launched, keep, kept
from pipeflow.parallel.launch import launch
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.tensor.random import current_tracker, manual_seed

_KEY = "Megatron-LM's parallel state"
_SEED = 1234  # of dropout, until model_parallel_cuda_manual_seed gives another


@dataclass
class _Stages:
    """What is said of this rank's stages."""

    number: int | None  # of them
    making: int | None = None  # which of them is
    seed: int | None = None  # of first weights


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
) -> None:
    """Arranges the processes, as `pipeflow.launch` does from torchrun's environment: tensor ranks are neighbours, then
    come those of a pipeline, then replicas. Makes torch.distributed's process group unless there is one. After
    `destroy_model_parallel` it may be called again, with other sizes. Where `pipeflow.launch` was called with these
    sizes, its Context is taken.

    Torch's default generator starts from one seed on all ranks of a replica, the first one's, unless they were seeded
    alike: loaders that shuffle by it read the same on them.

    Args:
        virtual_pipeline_model_parallel_size: stages a rank, for the interleaved schedule.
        context_parallel_size, expert_model_parallel_size: 1; no layer here is split in these ways.

    Raises UsageError when the world does not fit, for sizes that do not exist here, and when it was called before.
    """
    if kept(_KEY) is not None:
        raise UsageError("model parallelism is initialized already: call destroy_model_parallel() first")
    for name, size in (("context", context_parallel_size), ("expert model", expert_model_parallel_size)):
        if size != 1:
            raise UsageError(f"there is no {name} parallelism here: its size is 1, got {size}")
    chunks = virtual_pipeline_model_parallel_size
    if chunks is not None and (chunks < 1 or pipeline_model_parallel_size < 2):
        raise UsageError(
            f"virtual_pipeline_model_parallel_size={chunks} needs to be 1 or more, in a pipeline of at least 2 ranks, "
            f"got a pipeline of {pipeline_model_parallel_size}"
        )
    sizes = pipeline_model_parallel_size, tensor_model_parallel_size
    context = current_context() if is_launched() else launch(*sizes)
    if (context.pipeline_size, context.tensor_size) != sizes:
        raise UsageError(
            f"pipeflow was launched with a pipeline of {context.pipeline_size} and {context.tensor_size} tensor ranks: "
            f"call destroy_model_parallel() first, or give these sizes, got {sizes[0]} and {sizes[1]}"
        )
    keep(_KEY, _Stages(chunks))
    _agree_on_seed(context)
    if current_tracker() is None:
        manual_seed(_SEED)


def _agree_on_seed(context: Context) -> None:
    """Where torch was not seeded alike on the ranks of a replica, seeds it as on the first of them."""
    with context.alarm.raised_everywhere():
        everyone: list[Any] = all_gather_object(context.world, torch.initial_seed())
    replica = context.layout.replica_ranks(context.rank)
    if any(everyone[rank] != everyone[replica[0]] for rank in replica):
        torch.manual_seed(everyone[replica[0]])


def destroy_model_parallel() -> None:
    """Gives the channels back; nothing to do when nothing was initialized. torch.distributed's process group stays."""
    if is_launched():
        current_context().close()


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` was called, and `destroy_model_parallel` was not."""
    return is_launched()


is_initialized = model_parallel_is_initialized


def context_here() -> Context:
    """The Context behind these names. Raises UsageError before `initialize_model_parallel`, as all
    questions below do.
    """
    if not is_launched():
        raise UsageError("model parallelism is not initialized: call initialize_model_parallel(tensor, pipeline) first")
    return current_context()


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share every layer."""
    return context_here().tensor_size


def get_tensor_model_parallel_rank() -> int:
    """Which of them this is."""
    return context_here().tensor_rank


def get_tensor_model_parallel_src_rank() -> int:
    """The rank in the world of the first of them."""
    context = context_here()
    return context.layout.tensor_ranks(context.rank)[0]


def get_pipeline_model_parallel_world_size() -> int:
    """How many ranks the pipeline has."""
    return context_here().pipeline_size


def get_pipeline_model_parallel_rank() -> int:
    """Which of them this is."""
    return context_here().pipeline_rank


def get_pipeline_model_parallel_first_rank() -> int:
    """The rank in the world of the pipeline's first."""
    context = context_here()
    return context.layout.pipeline_ranks(context.rank)[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """The rank in the world of the pipeline's last."""
    context = context_here()
    return context.layout.pipeline_ranks(context.rank)[-1]


def get_data_parallel_world_size() -> int:
    """How many replicas there are."""
    return context_here().data_size


def get_data_parallel_rank() -> int:
    """Which of them this is part of."""
    return context_here().data_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """How many stages a rank has, or None where that was not said."""
    return _stages().number


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Which of this rank's stages is being made, or None where that was not said."""
    return _stages().making


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Says which of this rank's stages is made next, where GPTModel is not told its `vp_stage`."""
    _stages().making = rank


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this rank is the first of its pipeline and, unless `ignore_virtual`, its stage the first of all."""
    return context_here().pipeline_rank == 0 and (ignore_virtual or chunk_of(vp_stage) == 0)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this rank is the last of its pipeline and, unless `ignore_virtual`, its stage the last of all."""
    context, chunks = context_here(), get_virtual_pipeline_model_parallel_world_size() or 1
    is_last = context.pipeline_rank == context.pipeline_size - 1
    return is_last and (ignore_virtual or chunk_of(vp_stage) == chunks - 1)


def chunk_of(vp_stage: int | None) -> int:
    """Which of this rank's stages is meant: `vp_stage`, else the one that was set, else the first."""
    chunk = (get_virtual_pipeline_model_parallel_rank() or 0) if vp_stage is None else vp_stage
    chunks = get_virtual_pipeline_model_parallel_world_size() or 1
    if not 0 <= chunk < chunks:
        raise UsageError(f"there is no stage {chunk} on this rank: it has {chunks}, counted from 0")
    return chunk


def keep_seed(seed: int) -> None:
    """Makes `seed` that of models' first weights."""
    _stages().seed = seed


def seed_of_weights() -> int:
    """The one that was kept, else torch's."""
    seed = _stages().seed
    return torch.initial_seed() if seed is None else seed


def _stages() -> _Stages:
    context_here()
    if kept(_KEY) is None:
        keep(_KEY, _Stages(None))
    stages: _Stages = kept(_KEY)
    return stages


def get_tensor_model_parallel_group() -> ProcessGroup:
    """For torch.distributed: the ranks that share every layer. All ranks ask for their first group together."""
    return context_here().mesh.get_group("tensor")


def get_pipeline_model_parallel_group() -> ProcessGroup:
    """The group, for torch.distributed, of the pipeline's ranks. All ranks ask for their first group together."""
    return context_here().mesh.get_group("pipeline")


def get_data_parallel_group() -> ProcessGroup:
    """For torch.distributed: the ranks that hold the same weights. All ranks ask for their first group together."""
    return context_here().mesh.get_group("data")
