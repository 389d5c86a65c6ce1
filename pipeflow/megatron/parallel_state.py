"""Megatron-LM's `megatron.core.parallel_state`: the layout of the processes, on `launch` and its Context; and the seed
of a model's weights and dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from pipeflow.adapters.ranks import launched, objects_of_all
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, current_context, is_launched, keep, kept
from pipeflow.engine.tensor.random import current_tracker, manual_seed

_KEY = "Megatron-LM's parallel state"
_SEED = 1234  # of dropout, until model_parallel_cuda_manual_seed sets another


@dataclass
class _Stages:
    """The number and the seed of this rank's stages, and the stage that is being made."""

    number: int | None  # of stages
    making: int | None = None  # index of the stage that is being made
    seed: int | None = None  # of initial weights


_ORDER = ("tp", "pp", "dp")  # tensor ranks are neighbours, then pipeline ranks, then replicas


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    order: str | None = None,
) -> None:
    """Arranges the processes as `pipeflow.launch` does, from torchrun's environment: tensor ranks are neighbours, then
    pipeline ranks, then replicas. Makes torch.distributed's process group if there is none. If `pipeflow.launch` was
    called with these sizes, its Context is used. After `destroy_model_parallel` it can be called with other sizes.

    If the ranks of a replica have different seeds, the function seeds torch's default generator on all of them with the
    first rank's seed. Loaders that shuffle with this generator then read the same data.

    Args:
        tensor_model_parallel_size: number of tensor ranks.
        pipeline_model_parallel_size: number of pipeline ranks.
        virtual_pipeline_model_parallel_size: number of stages per rank, for the interleaved schedule.
        context_parallel_size, expert_model_parallel_size: must be 1; other values are not supported.
        order: the order of the ranks, as in Megatron-LM, whose own default puts replicas before pipeline ranks. Here
            it must have tp, pp and dp in this order.

    Raises UsageError if the sizes do not fit the world or are not supported, and if it was called before.
    """
    if kept(_KEY) is not None:
        raise UsageError("model parallelism is initialized already: call destroy_model_parallel() first")
    for name, size in (("context", context_parallel_size), ("expert model", expert_model_parallel_size)):
        if size != 1:
            raise UsageError(f"{name} parallelism is not supported here: its size must be 1, got {size}")
    if order is not None and [each for each in order.split("-") if each in _ORDER] != [*_ORDER]:
        raise UsageError(f"order must have tp, pp and dp in this order, such as 'tp-cp-ep-pp-dp', got {order!r}")
    chunks = virtual_pipeline_model_parallel_size
    if chunks is not None and (chunks < 1 or pipeline_model_parallel_size < 2):
        raise UsageError(
            f"virtual_pipeline_model_parallel_size must be at least 1, in a pipeline of at least 2 ranks; got {chunks} "
            f"in a pipeline of {pipeline_model_parallel_size}"
        )
    sizes = pipeline_model_parallel_size, tensor_model_parallel_size
    context = launched(*sizes, instead="pass the same sizes, or call destroy_model_parallel() first")
    keep(_KEY, _Stages(chunks))
    _agree_on_seed(context)
    if current_tracker() is None:
        manual_seed(_SEED)


def _agree_on_seed(context: Context) -> None:
    """Seeds torch on the ranks of a replica as on its first rank, unless they were seeded alike."""
    everyone = objects_of_all(context, torch.initial_seed())
    replica = context.layout.replica_ranks(context.rank)
    if any(everyone[rank] != everyone[replica[0]] for rank in replica):
        torch.manual_seed(everyone[replica[0]])


def destroy_model_parallel() -> None:
    """Closes pipeflow's channels. Does nothing if nothing was initialized. torch.distributed's process group stays."""
    if is_launched():
        current_context().close()


def model_parallel_is_initialized() -> bool:
    """Returns True between `initialize_model_parallel` and `destroy_model_parallel`."""
    return is_launched()


is_initialized = model_parallel_is_initialized


def context_here() -> Context:
    """Returns the Context. Like all functions below, raises UsageError before `initialize_model_parallel`."""
    if not is_launched():
        raise UsageError("model parallelism is not initialized: call initialize_model_parallel(tensor, pipeline) first")
    return current_context()


def get_tensor_model_parallel_world_size() -> int:
    """Returns the number of tensor ranks."""
    return context_here().tensor_size


def get_tensor_model_parallel_rank() -> int:
    """Returns this rank's index among the tensor ranks."""
    return context_here().tensor_rank


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the world rank of the first of the tensor ranks."""
    context = context_here()
    return context.layout.tensor_ranks(context.rank)[0]


def get_pipeline_model_parallel_world_size() -> int:
    """Returns the number of pipeline ranks."""
    return context_here().pipeline_size


def get_pipeline_model_parallel_rank() -> int:
    """Returns this rank's index in the pipeline."""
    return context_here().pipeline_rank


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the world rank of the pipeline's first rank."""
    context = context_here()
    return context.layout.pipeline_ranks(context.rank)[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the world rank of the pipeline's last rank."""
    context = context_here()
    return context.layout.pipeline_ranks(context.rank)[-1]


def get_data_parallel_world_size() -> int:
    """Returns the number of data-parallel replicas."""
    return context_here().data_size


def get_data_parallel_rank() -> int:
    """Returns the index of this rank's replica."""
    return context_here().data_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of stages per rank; None if it was not set."""
    return _stages().number


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the index of this rank's stage that is made next; None if it was not set."""
    return _stages().making


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets the index of this rank's stage that is made next, for a GPTModel without `vp_stage`."""
    _stages().making = rank


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Returns True if this rank is the first of its pipeline and, unless `ignore_virtual`, its stage is the first."""
    return context_here().pipeline_rank == 0 and (ignore_virtual or chunk_of(vp_stage) == 0)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Returns True if this rank is the last of its pipeline and, unless `ignore_virtual`, its stage is the last."""
    context, chunks = context_here(), get_virtual_pipeline_model_parallel_world_size() or 1
    is_last = context.pipeline_rank == context.pipeline_size - 1
    return is_last and (ignore_virtual or chunk_of(vp_stage) == chunks - 1)


def chunk_of(vp_stage: int | None) -> int:
    """Returns the index of a stage on this rank: `vp_stage`, else the one that was set, else 0."""
    chunk = (get_virtual_pipeline_model_parallel_rank() or 0) if vp_stage is None else vp_stage
    chunks = get_virtual_pipeline_model_parallel_world_size() or 1
    if not 0 <= chunk < chunks:
        raise UsageError(f"this rank has no stage {chunk}: it has {chunks}, counted from 0")
    return chunk


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds dropout on any device (`pipeflow.tensor.manual_seed`): tensor ranks draw the same numbers outside split
    regions and different numbers inside. Also seeds the initial weights of models made afterwards, and torch's default
    generator of the GPU, but not that of the CPU, which loaders use for shuffling.
    """
    _stages().seed = seed
    manual_seed(seed)
    torch.cuda.manual_seed(seed)


def seed_of_weights() -> int:
    """Returns the seed of initial weights that was set, else torch's."""
    seed = _stages().seed
    return torch.initial_seed() if seed is None else seed


def _stages() -> _Stages:
    context_here()
    if kept(_KEY) is None:
        keep(_KEY, _Stages(None))
    stages: _Stages = kept(_KEY)
    return stages


def get_tensor_model_parallel_group() -> ProcessGroup:
    """Returns torch.distributed's group of the tensor ranks. All ranks call it together the first time."""
    return context_here().mesh.get_group("tensor")


def get_pipeline_model_parallel_group() -> ProcessGroup:
    """Returns torch.distributed's group of the pipeline ranks. All ranks call it together the first time."""
    return context_here().mesh.get_group("pipeline")


def get_data_parallel_group() -> ProcessGroup:
    """Returns torch.distributed's group of the data ranks. All ranks call it together the first time."""
    return context_here().mesh.get_group("data")
