"""Options of an Accelerator: the sizes of the layout, by accelerate's names too, and the options that are refused, each
with what works instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import accelerate
from accelerate.utils import DistributedDataParallelKwargs

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context, context_if_launched
from pipeflow.parallel.launcher import launch

_CUTS = "pipeline= and tensor= divide the model, and further processes are replicas"
_REFUSED = {
    "fsdp_plugin": _CUTS,
    "deepspeed_plugin": _CUTS,
    "deepspeed_plugins": _CUTS,
    "megatron_lm_plugin": _CUTS,
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
            raise UsageError(f"{variable} asks for {name}, which no pipeline uses: {_CUTS}; unset the variable")
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


def sizes_of(config: Any, pipeline: int | None, tensor: int | None) -> tuple[int | None, int | None]:
    """The sizes of pipeline and tensor, from the arguments and a ParallelismConfig. Raises UsageError if both say
    something else, or for a size that only other engines have.
    """
    if config is None:
        return pipeline, tensor
    for name in ("dp_shard_size", "cp_size", "sp_size"):
        if (getattr(config, name) or 1) > 1:
            raise UsageError(f"{name} is not possible with a pipeline: use pp_size, tp_size and dp_replicate_size")
    depth, width = getattr(config, "pp_size", pipeline), config.tp_size or 1
    if pipeline not in (None, depth) or tensor not in (None, width):
        raise UsageError(
            f"parallelism_config says pp_size={depth} and tp_size={width}, but the arguments pipeline={pipeline} and "
            f"tensor={tensor}: give each size once"
        )
    return depth, width


def launched(pipeline: int | None, tensor: int | None, *, cpu: bool, config: Any) -> Context:
    """The context, launched here unless it was before. Raises UsageError if it has other sizes than these."""
    context = context_if_launched()
    if context is None:
        context = launch(pipeline, tensor or 1, device="cpu" if cpu else None)
    pipeline = context.pipeline_size if pipeline is None else pipeline
    tensor = context.tensor_size if tensor is None else tensor
    here = context.data_size, context.pipeline_size, context.tensor_size
    replicas = getattr(config, "dp_replicate_size", None) or here[0]
    if here != (replicas, pipeline, tensor):
        raise UsageError(
            f"the {context.world_size} processes are launched as {here[0]} replicas of {here[1]} pipeline ranks with "
            f"{here[2]} tensor ranks, but the Accelerator is to have {replicas}, {pipeline} and {tensor}: start as "
            "many processes as their product, and pass the same sizes to pipeflow.launch"
        )
    return context
