"""The options of DeepSpeed for a plan, as JSON. Must not contain: those of the model.

Names and meanings are from deepspeedai/DeepSpeed 0.19.6: docs/_pages/config-json.md (batches, `zero_optimization`,
MiCS), deepspeed/runtime/constants.py (`data_types`), deepspeed/runtime/config.py (`pipeline`) and
deepspeed/runtime/precision_config.py (`bf16`, `fp16`). Its pipeline has 1F1B alone, in
deepspeed/runtime/pipe/schedule.py, and divides layers itself, in deepspeed/runtime/pipe/module.py. In bf16 it splits
the optimizer's state at any ZeRO stage, in deepspeed/runtime/bf16_optimizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.planning.libraries.library import (
    SINGLE,
    Library,
    LibraryOptions,
    common_notes,
    has_order,
    no_schedule,
    order_of_ranks,
    require_plain_stages,
    require_reductions,
)
from pipeflow.planning.step_plan import Plan

NAME = "DeepSpeed"
SCHEDULES = MappingProxyType({"1f1b": "TrainSchedule"})
PRECISION: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "float32": {},
        "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        "bf16-mixed": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "fp16": {"fp16": {"enabled": True}},
    }
)


def options(found: Plan) -> LibraryOptions:
    """The configuration of a plan. Raises UsageError for what DeepSpeed cannot do."""
    _require(found)
    require_reductions(NAME, found)
    require_plain_stages(NAME, found)
    setup, pipeline, many = found.setup, len(found.ranks), found.schedule.num_microbatches
    config: dict[str, Any] = {
        "train_batch_size": many * setup.microbatch_size * setup.data,
        "train_micro_batch_size_per_gpu": setup.microbatch_size,
        "gradient_accumulation_steps": many,
        "zero_optimization": _zero(found),
    }
    if pipeline > 1:
        config["pipeline"] = {"stages": pipeline, "activation_checkpoint_interval": int(setup.checkpoint == "full")}
    config |= PRECISION[setup.precision.name]
    return LibraryOptions(
        json.dumps(config, indent=2), (*_notes(found), *common_notes(NAME, found), *order_of_ranks(NAME, found))
    )


LIBRARY = Library(NAME, "0.19.6", SCHEDULES, options, "the lines of docs/recording/deepspeed.md", SINGLE)


def _zero(found: Plan) -> dict[str, Any]:
    setup = found.setup
    chosen: dict[str, Any] = {"stage": setup.zero}
    if setup.overlaps != (setup.zero == 3):  # as it is by default
        chosen["overlap_comm"] = setup.overlaps
    if setup.offload_optimizer and (not setup.zero or len(found.ranks) > 1 or setup.offload_optimizer < 1):
        raise UsageError(f"{NAME} offloads a whole optimizer with ZeRO and no pipeline: plan with --zero, --pipeline 1")
    if setup.offload_optimizer:
        chosen["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if setup.shards < setup.data and setup.zero:
        chosen["mics_shard_size"] = setup.shards
    return chosen


def _notes(found: Plan) -> Iterator[str]:
    setup, pipeline = found.setup, len(found.ranks)
    if pipeline > 1:
        yield (
            f"give PipelineModule num_stages={pipeline} and partition_method='type:NAME', where NAME is the class of "
            f"layers, so that each stage has {found.model.layers // pipeline} layers"
        )
    elif setup.checkpoint == "full":
        yield f"without a pipeline, {NAME} does not recompute layers: the model has to checkpoint each of them"
    if setup.tensor > 1:
        both = " and sequence parallelism" if setup.sequence_parallel else ""
        yield f"tensor ranks{both} come from the model, with a topology of {setup.tensor} model-parallel ranks"


def _require(found: Plan) -> None:
    setup, precision, pipeline = found.setup, found.setup.precision.name, len(found.ranks)
    if not has_order(found.schedule, "1f1b"):
        raise no_schedule(NAME, found.schedule, "1f1b")
    if len({end - start for start, end in found.cut}) > 1:
        raise UsageError(
            f"{NAME} divides layers itself and takes no numbers of layers: the nearest is the same number in each of "
            f"the {pipeline} stages, with --cut even and a multiple of {pipeline} layers"
        )
    if precision not in PRECISION:
        nearest = "fp16" if precision == "fp16-mixed" else "bf16-mixed"
        raise UsageError(f"{NAME} does not train in {precision} as planned: the nearest is --precision {nearest}")
    if setup.checkpoint in ("selective", "op"):
        raise UsageError(f"{NAME} recomputes whole layers only: the nearest is --checkpoint full")
    if setup.zero > 1 and pipeline > 1:
        raise UsageError(f"the pipeline of {NAME} has ZeRO-1 at most: the nearest is --zero 1, or --pipeline 1")
    if 0 < setup.zero < 3 and setup.shards < setup.data:
        raise UsageError(f"{NAME} splits over some replicas only with ZeRO-3 (MiCS): plan with --zero 3")
    if precision in {"bf16", "bf16-mixed"} and setup.data > 1 and not setup.zero:
        raise UsageError(f"{NAME} splits the optimizer's state over the replicas in bf16 anyway: plan with --zero")
