"""The options of torchtitan for a plan, as TOML. Must not contain: those of the model.

Names and meanings are from pytorch/torchtitan at v0.2.2, the newest release: torchtitan/config/job_config.py, and for
stages torchtitan/distributed/pipeline_parallel.py. The main branch has no TOML any more, and counts batches in tokens.
What can be combined is in torchtitan/models/llama3/infra/parallelize.py and `maybe_enable_amp` of
torchtitan/distributed/utils.py. The schedules are those of `get_schedule_class` in
pytorch/pytorch/torch/distributed/pipelining/schedules.py.

FSDP without resharding after a forward is what a plan with ZeRO-1 counts: the gathered weights stay, gradients are
reduced once after the pipeline's last backward, and each replica has its part of the optimizer's state. A plan with
ZeRO-3 counts stages that torch's schedules gather and reshard, and without a pipeline FSDP that reshards each layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import MappingProxyType

from pipeflow.core.analysis.difference import has_halves
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.layer_kinds import kinds_of
from pipeflow.planning.libraries.library import (
    SINGLE,
    Library,
    LibraryOptions,
    common_notes,
    has_order,
    no_schedule,
    order_of_ranks,
    require_language_model,
    require_plain_stages,
    require_reductions,
    stages_per_rank,
)
from pipeflow.planning.step_plan import Plan

NAME = "torchtitan"
SCHEDULES = MappingProxyType(
    {
        "1f1b": "1F1B",
        "gpipe": "GPipe",
        "interleaved-1f1b": "Interleaved1F1B",
        "interleaved-zb": "InterleavedZeroBubble",
        "zb-v": "ZBVZeroBubble",
        "dualpipe-v": "DualPipeV",
    }
)
IN_GROUPS = ("interleaved-1f1b", "interleaved-zb")  # torch divides their microbatches into equal groups


def options(found: Plan) -> LibraryOptions:
    """The sections of a plan. Raises UsageError for what torchtitan cannot do."""
    require_language_model(NAME, found)
    if len(found.ranks) == 1:
        require_reductions(NAME, found)
    require_plain_stages(NAME, found)
    schedule = _schedule(found.schedule)
    _require_modules(found)
    _require_kinds(found.model)
    _require_setup(found)
    return LibraryOptions(
        "\n".join(_lines(found, schedule)), (*_notes(found), *common_notes(NAME, found), *order_of_ranks(NAME, found))
    )


LIBRARY = Library(
    NAME, "0.2.2", SCHEDULES, options, "enable_profiling = true and profile_freq = 10 under [profiling]", SINGLE
)


def _lines(found: Plan, schedule: str) -> Iterator[str]:
    setup, pipeline = found.setup, len(found.ranks)
    local = setup.microbatch_size * (found.schedule.num_microbatches if pipeline > 1 else 1)
    yield "[parallelism]"
    yield f"pipeline_parallel_degree = {pipeline}"
    if pipeline > 1:
        yield f'pipeline_parallel_schedule = "{schedule}"'
        yield f"pipeline_parallel_microbatch_size = {setup.microbatch_size}"
        yield "module_fqns_per_model_part = ["
        yield from (f"    {json.dumps(names)}," for names in _modules(found))
        yield "]"
    yield f"tensor_parallel_degree = {setup.tensor}"
    yield f"data_parallel_replicate_degree = {setup.data // setup.shards}"
    yield f"data_parallel_shard_degree = {setup.shards}"
    yield f'fsdp_reshard_after_forward = "{"always" if setup.zero == 3 and pipeline == 1 else "never"}"'
    yield "\n[training]"
    yield f"local_batch_size = {local}"
    yield f"global_batch_size = {found.schedule.num_microbatches * setup.microbatch_size * setup.data}"
    yield f"seq_len = {found.sequence}"
    yield 'dtype = "float32"'
    yield f'mixed_precision_param = "{"float32" if setup.precision.name == "float32" else "bfloat16"}"'
    yield 'mixed_precision_reduce = "float32"'
    yield "\n[activation_checkpoint]"
    yield f'mode = "{"selective" if setup.checkpoint == "op" else setup.checkpoint}"'
    yield from ['selective_ac_option = "op"'] * (setup.checkpoint == "op")


def _modules(found: Plan) -> list[list[str]]:
    """Per stage, the names of its modules."""
    modules = [[f"layers.{layer}" for layer in range(*part)] for part in found.cut]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", "output"]
    return modules


def _notes(found: Plan) -> Iterator[str]:
    setup = found.setup
    if setup.precision.name == "bf16":
        yield f"{NAME} adds up gradients in float32; --precision bf16-mixed plans their bytes"
    if setup.zero and setup.data > 1 and not setup.overlaps:
        yield f"{NAME} reduces gradients while layers compute; --overlap plans that"
    if setup.zero == 1 and setup.data > 1 and len(found.ranks) == 1 and found.schedule.num_microbatches > 1:
        yield f"without a pipeline, {NAME} reduces gradients after each microbatch; the plan reduces them once"


def _schedule(schedule: Schedule) -> str:
    """The name of the schedule in torch. Raises UsageError for another one."""
    ranks, many, chunks = schedule.placement.num_ranks, schedule.num_microbatches, stages_per_rank(schedule)
    for name, theirs in SCHEDULES.items():
        if (ranks > 1 or (name, chunks) == ("1f1b", 1)) and has_order(schedule, name):
            if name in IN_GROUPS and many % ranks:
                raise UsageError(
                    f"torch's {theirs} runs groups of at least {ranks} microbatches, into which {many} do not divide: "
                    f"use a multiple of {ranks}, or --schedule 1f1b"
                )
            if name == "dualpipe-v" and many < 2 * ranks:
                raise UsageError(f"torch's {theirs} needs at least {2 * ranks} microbatches here, and has {many}")
            return theirs
    raise no_schedule(NAME, schedule, _nearest(schedule))


def _nearest(schedule: Schedule) -> str:
    chunks, placement = stages_per_rank(schedule), schedule.placement
    if placement.num_ranks == 1 or chunks == 1:
        return "dualpipe-v" if len(placement.paths) > 1 and placement.num_ranks > 1 else "1f1b"
    if placement == Placement.vee(placement.num_ranks):
        return "zb-v"
    return f"{'interleaved-zb' if has_halves(schedule) else 'interleaved-1f1b'} --chunks {chunks}"


def _require_modules(found: Plan) -> None:
    empty = [stage for stage, modules in enumerate(_modules(found)) if not modules]
    if empty:
        raise UsageError(
            f"stage {empty[0]} has no layers, and {NAME} cannot train a stage without parameters: the nearest layout "
            "that it has gives the stage a layer"
        )


def _require_kinds(model: Transformer) -> None:
    """Raises UsageError unless experts are in every N-th layer (`interleave_moe_layer_step` of its Llama 4), or in all
    but the first ones (`n_dense_layers` of its DeepSeek-V3).
    """
    kinds, layers = model.kinds, model.layers
    if "experts" in kinds and kinds not in (
        kinds_of(layers, kinds.index("experts") + 1, 0),
        kinds_of(layers, None, kinds.index("experts")),
    ):
        raise UsageError(
            f"models of {NAME} have experts in every N-th layer or in all but the first ones: the nearest is a number "
            "as expert_layers, or dense_layers"
        )


def _require_setup(found: Plan) -> None:
    setup, precision = found.setup, found.setup.precision.name
    ranks = len(found.ranks) * setup.tensor
    if precision not in {"float32", "bf16", "bf16-mixed"}:
        raise UsageError(f"{NAME} does not train in {precision} as planned: the nearest is --precision bf16-mixed")
    if setup.offload_optimizer:
        raise UsageError(f"{NAME} steps the optimizer on the device: plan without --offload-optimizer")
    if setup.stores_scores:
        wanted = "--checkpoint full or none" if setup.checkpoint == "selective" else "a plan without --keep-scores"
        raise UsageError(f"{NAME} has fused attention, which stores no scores: the nearest is {wanted}")
    if setup.tensor > 1 and not setup.sequence_parallel:
        raise UsageError(f"tensor ranks of {NAME} always split the sequence, too: plan with --sequence-parallel")
    if setup.data > 1 and not setup.zero and ranks > 1:
        raise UsageError(f"{NAME} has whole replicas only without tensor and pipeline ranks: plan with --zero")
    if precision != "float32" and not (setup.zero and setup.data > 1):
        raise UsageError(
            f"{NAME} keeps weights in bf16 only where replicas split the optimizer (FSDP): plan with --zero and at "
            "least 2 replicas, or with --precision float32"
        )
