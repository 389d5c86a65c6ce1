"""The options of Megatron-LM for a plan. Must not contain: those of the model beside its number of layers, and which
have experts.

Names and meanings are from NVIDIA/Megatron-LM/megatron/training/arguments.py, and from the classes of
megatron/training/config and megatron/core whose fields are flags; all exist at d98e8a64 of 2026-08-22. The schedules,
and which numbers of microbatches can be interleaved, are from
NVIDIA/Megatron-LM/megatron/core/pipeline_parallel/schedules.py. The string of a layout is described in `LayoutString`.
Its own FSDP divides gradients and weights (megatron/core/distributed/fsdp), in each microbatch and layer.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pipeflow.core.errors import UsageError
from pipeflow.planning.layer_kinds import expert_list
from pipeflow.planning.libraries.library import (
    Library,
    LibraryOptions,
    common_notes,
    has_order,
    no_schedule,
    require_language_model,
    require_reductions,
    stages_per_rank,
)
from pipeflow.planning.setup import Setup
from pipeflow.planning.step_plan import Plan

NAME = "Megatron-LM"
SCHEDULES = MappingProxyType({"1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B"})
PRECISION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "float32": (),
        "bf16": ("--bf16", "--grad-reduce-in-bf16"),
        "bf16-mixed": ("--bf16",),
        "fp16": ("--fp16",),
        "fp16-mixed": ("--fp16", "--accumulate-allreduce-grads-in-fp32"),
        "fp8": ("--bf16", "--fp8-format hybrid", "--grad-reduce-in-bf16"),
        "fp8-current": ("--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise", "--grad-reduce-in-bf16"),
        "fp8-block": ("--bf16", "--fp8-format e4m3", "--fp8-recipe blockwise", "--grad-reduce-in-bf16"),
        "mxfp8": ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8", "--grad-reduce-in-bf16"),
        "nvfp4": ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4", "--grad-reduce-in-bf16"),
    }
)
RECOMPUTATION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "selective": ("--recompute-granularity selective",),
        "full": ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"),
    }
)


def options(found: Plan) -> LibraryOptions:
    """The flags of a plan, one a line, as a shell reads them. Raises UsageError for schedules that Megatron-LM does not
    have, and for models that are no language models.
    """
    require_language_model(NAME, found)
    require_reductions(NAME, found)
    note = f"start {found.devices} processes: {NAME} makes replicas of all that the other sizes leave"
    return LibraryOptions("\n".join(_flags(found)), (note, *common_notes(NAME, found)))


RECORDING = "--profile --use-pytorch-profiler --profile-step-start 10 --profile-step-end 12 --tensorboard-dir traces"
LIBRARY = Library(NAME, "d98e8a64 of 2026-08-22", SCHEDULES, options, RECORDING)


def _flags(found: Plan) -> Iterator[str]:
    setup, pipeline = found.setup, len(found.ranks)
    yield f"--num-layers {found.model.layers}"
    if len({*found.model.kinds}) > 1:
        yield f"--moe-layer-freq {shlex.quote(expert_list(found.model.kinds))}"
    yield f"--seq-length {found.sequence}"
    yield f"--tensor-model-parallel-size {setup.tensor}"
    yield f"--pipeline-model-parallel-size {pipeline}"
    yield from _stages(found)
    yield from _ranks_in_stages(setup)
    if pipeline > 1 and setup.data > 1 and setup.expert == 1:
        yield "--use-tp-pp-dp-mapping"
    yield f"--micro-batch-size {setup.microbatch_size}"
    yield f"--global-batch-size {found.schedule.num_microbatches * setup.microbatch_size * setup.data}"
    if setup.sequence_parallel and setup.tensor > 1:
        yield "--sequence-parallel"
    yield from _recomputation(setup)
    if setup.stores_scores:
        yield "--attention-backend unfused"
    yield from _sharding(found)
    yield from PRECISION[setup.precision.name]


def _sharding(found: Plan) -> Iterator[str]:
    """The flags for what data ranks divide. Raises UsageError for divided weights or gradients on pipeline ranks."""
    setup = found.setup
    if setup.zero > 1 and len(found.ranks) > 1:
        raise UsageError(
            f"{NAME} does not divide weights of pipeline ranks as planned: the nearest is --zero 1, or --pipeline 1"
        )
    if setup.offload_optimizer and not (setup.zero == 1 and setup.precision.master):
        raise UsageError(f"{NAME} offloads an optimizer with master weights that replicas divide: plan with --zero 1")
    if setup.offload_optimizer:
        yield "--optimizer-cpu-offload --use-precision-aware-optimizer"
        yield f"--optimizer-offload-fraction {setup.offload_optimizer:g}"
    if setup.zero:
        yield "--use-distributed-optimizer"
    if setup.zero > 1:
        strategy = "optim_grads" if setup.zero == 2 else "optim_grads_params"
        yield from ("--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}")
        yield from ("--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor")
    if setup.zero and setup.shards < setup.data:
        yield f"--num-distributed-optimizer-instances {setup.data // setup.shards}"
    if setup.overlaps and setup.data > 1:
        yield "--overlap-grad-reduce"
        yield from ["--overlap-param-gather"] * bool(setup.zero)
    if setup.hides_tensor and setup.tensor > 1:
        yield "--tp-comm-overlap"


def _recomputation(setup: Setup) -> Iterator[str]:
    """The flags for what backwards compute again, and for what goes to the host. Raises UsageError for single products,
    which Megatron-LM does not recompute.
    """
    if setup.checkpoint == "op":
        raise UsageError(f"{NAME} recomputes modules, not single products: the nearest is --recompute-modules mlp")
    if setup.checkpoint_layers is None and not setup.recompute_modules:
        yield from RECOMPUTATION[str(setup.checkpoint)]
    elif setup.checkpoint_layers is not None:
        yield from ("--recompute-granularity full", "--recompute-method block")
        yield f"--recompute-num-layers {setup.checkpoint_layers}"
    else:
        yield f"--recompute-granularity selective\n--recompute-modules {' '.join(setup.recompute_modules)}"
    if setup.offload_layers:
        yield f"--cpu-offloading-num-layers {setup.offload_layers}"


def _ranks_in_stages(setup: Setup) -> Iterator[str]:
    """The flags for context and expert ranks."""
    if setup.context > 1:
        kind = {"ring": "p2p", "all-to-all": "a2a", "gather": "all_gather"}[setup.context_kind]
        yield f"--context-parallel-size {setup.context}"
        yield f"--cp-comm-type {kind}"
    if setup.expert > 1:
        yield f"--expert-model-parallel-size {setup.expert}"
        yield f"--expert-tensor-parallel-size {setup.expert_split}"
        is_flat = setup.dispatcher == "all-to-all"
        yield f"--moe-token-dispatcher-type {'alltoall' if is_flat else 'flex'}"
        if not is_flat:
            yield f"--moe-flex-dispatcher-backend {setup.dispatcher}"
    if setup.overlap_experts:
        yield "--overlap-moe-expert-parallel-comm"
    if setup.cuda_graphs:
        yield f"--cuda-graph-scope {' '.join(setup.cuda_graphs)}"


def _stages(found: Plan) -> Iterator[str]:
    """The flags for the stages and the order in which they run."""
    chunks, group = stages_per_rank(found.schedule), _group(found)
    if found.has_uneven_layout:
        yield f"--pipeline-model-parallel-layout {shlex.quote(str(found.layout_string))}"
    elif chunks > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {found.model.layers // (len(found.ranks) * chunks)}"
    if group != len(found.ranks):
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {group}"


def _group(found: Plan) -> int:
    """How many microbatches go through a chunk in turn: as many as there are ranks, where it does not matter too.
    Raises UsageError for another schedule than 1F1B and interleaved 1F1B.
    """
    schedule, ranks, many = found.schedule, len(found.ranks), found.schedule.num_microbatches
    chunks = stages_per_rank(schedule)
    if has_order(schedule, "1f1b"):
        return ranks
    if ranks > 1 and chunks > 1 and has_order(schedule, "interleaved-1f1b") and many % ranks:
        raise UsageError(
            f"{NAME} interleaves microbatches in groups of at least {ranks}, into which {many} do not divide: "
            f"use a multiple of {ranks}, or --schedule 1f1b"
        )
    groups = (group for group in range(ranks, many + 1) if many % group == 0 and ranks > 1 and chunks > 1)
    for group in groups:
        if has_order(schedule, "interleaved-1f1b", group=group):
            return group
    raise no_schedule(NAME, schedule, f"interleaved-1f1b --chunks {chunks}" if ranks > 1 < chunks else "1f1b")
