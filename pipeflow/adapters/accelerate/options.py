"""Options of an Accelerator: the sizes of the layout, by accelerate's names too, and the options that are refused, each
with what works instead; and what accelerate is told of a rank: its processes are replicas; files, logs and trackers are
those of rank 0. Must not contain: messages between replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import accelerate
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor

from pipeflow.adapters.batches import part_of
from pipeflow.adapters.libraries import DIVIDED
from pipeflow.adapters.ranks import wait_for_all
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, current_context

_REFUSED = {
    "fsdp_plugin": DIVIDED,
    "deepspeed_plugin": DIVIDED,
    "deepspeed_plugins": DIVIDED,
    "megatron_lm_plugin": DIVIDED,
    "torch_tp_plugin": "pass tensor=",
    "dynamo_backend": "a rank has a part of the model only, so compile blocks of the module before prepare",
    "dynamo_plugin": "a rank has a part of the model only, so compile blocks of the module before prepare",
}
_VARIABLES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}


@dataclass
class ParallelismConfig(accelerate.ParallelismConfig):  # type: ignore[misc]  # accelerate has no types
    """accelerate's ParallelismConfig with the size of the pipeline.

    Args:
        pp_size: number of ranks in a pipeline.
        tp_size: number of processes that share every layer.
        dp_replicate_size: number of replicas.
        dp_shard_size, cp_size, sp_size: accelerate's other sizes, which are not possible with a pipeline.
        tp_handler, cp_handler, sp_handler, cp_backend, sp_backend: accelerate's options of these, which are not read.
    """

    pp_size: int = 1


def require_possible(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option of accelerate's Accelerator that a pipeline cannot honour, here or in the
    environment variables of `accelerate launch`.
    """
    for name, instead in _REFUSED.items():
        if options.get(name) is not None:
            raise UsageError(f"an Accelerator of a pipeline takes no {name}: {instead}")
    for variable, name in _VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UsageError(f"{variable} asks for {name}, which no pipeline uses: {DIVIDED}; unset the variable")
    if any(isinstance(each, DistributedDataParallelKwargs) for each in options.get("kwargs_handlers") or ()):
        raise UsageError(
            "an Accelerator of a pipeline uses no DistributedDataParallel, so remove DistributedDataParallelKwargs: "
            "the pipeline averages the gradients of its replicas itself"
        )
    precision = options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(precision) not in ("no", "bf16"):
        raise UsageError(f"mixed_precision={str(precision)!r} is not possible with a pipeline: use 'bf16' or 'no'")
    config = options.get("dataloader_config")
    if config is not None and config.dispatch_batches:
        raise UsageError("dispatch_batches=True is not possible with a pipeline: every rank reads its own batches")


def sizes_of(config: Any, pipeline: int | None, tensor: int | None) -> tuple[int | None, int | None, int | None]:
    """The sizes of pipeline, tensor and data, from the arguments and a ParallelismConfig; None for any. Raises
    UsageError if both say something else, or for a size that only other engines have.
    """
    if config is None:
        return pipeline, tensor, None
    for name in ("dp_shard_size", "cp_size", "sp_size"):
        if (getattr(config, name) or 1) > 1:
            raise UsageError(f"{name} is not possible with a pipeline: use pp_size, tp_size and dp_replicate_size")
    depth, width = getattr(config, "pp_size", pipeline), config.tp_size or 1
    if pipeline not in (None, depth) or tensor not in (None, width):
        raise UsageError(
            f"parallelism_config says pp_size={depth} and tp_size={width}, but the arguments pipeline={pipeline} and "
            f"tensor={tensor}: give each size once"
        )
    return depth, width, getattr(config, "dp_replicate_size", None) or None


def share_place(context: Context) -> None:
    """Tells accelerate this rank's place. Its state has the rank as `process_index`, by which it logs and names files;
    that of an Accelerator is the replica. Functions take the place of methods that depend on other processes.
    """
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    PartialState._shared_state.update(
        _cpu=context.device.type == "cpu",
        backend=None,
        debug=False,
        device=context.device,
        distributed_type=DistributedType.NO,
        fork_launched=False,
        local_process_index=int(os.environ.get("LOCAL_RANK", context.rank)),
        num_processes=context.data_size,
        process_index=context.rank,
        **{function.__name__: function for function in _METHODS},
    )


def is_last_process() -> bool:
    """True on the last rank of the world."""
    context = current_context()
    return context.rank == context.world_size - 1


def is_first_of(replica: int | None) -> bool:
    """True on the first rank of a replica."""
    context = current_context()
    return context.data_rank == replica and context.pipeline_rank == context.tensor_rank == 0


def wait_for_everyone() -> None:
    """Waits until all ranks have called it."""
    wait_for_all(current_context())


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function on rank 0, and one that does nothing elsewhere."""
    return function if PartialState().is_main_process else _nothing


def on_local_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function on the first rank of each machine, and one that does nothing elsewhere."""
    return function if PartialState().is_local_main_process else _nothing


def on_last_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function on the last rank, and one that does nothing elsewhere."""
    return function if is_last_process() else _nothing


def on_process(function: Callable[..., Any] | None = None, process_index: int | None = None) -> Callable[..., Any]:
    """Returns the function on the first rank of a replica, and one that does nothing elsewhere."""
    if function is None:
        return partial(on_process, process_index=process_index)
    return function if is_first_of(process_index) else _nothing


def on_local_process(
    function: Callable[..., Any] | None = None, local_process_index: int | None = None
) -> Callable[..., Any]:
    """Returns the function on one rank of each machine, and one that does nothing elsewhere."""
    if function is None:
        return partial(on_local_process, local_process_index=local_process_index)
    return function if PartialState().local_process_index == local_process_index else _nothing


@contextmanager
def split_between_processes(inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
    """Gives each replica its part of `inputs`: a list, a tuple, a tensor, or a dict of these."""
    context = current_context()
    yield _part(inputs, context.data_rank, context.data_size, apply_padding)


def _part(values: Any, index: int, count: int, pad: bool) -> Any:
    """Part `index` of `count` parts of `values` in order. With `pad`, the last value of all fills up shorter parts."""
    if isinstance(values, Mapping):
        return {key: _part(each, index, count, pad) for key, each in values.items()}
    last, longest = len(values) - 1, -(-len(values) // count)
    where = [*range(len(values))][part_of(len(values), count, index)]
    where += [last] * (pad * (longest - len(where)))
    if isinstance(values, Tensor):
        return values[where]
    if hasattr(values, "select"):  # a Dataset of the package datasets
        return values.select(where)
    return type(values)(values[each] for each in where)


def _nothing(*_: object, **__: object) -> None:
    """Takes the place of a function that runs elsewhere."""


_METHODS = (
    on_last_process,
    on_local_main_process,
    on_local_process,
    on_main_process,
    on_process,
    split_between_processes,
    wait_for_everyone,
)
