"""Library: another library that trains in a pipeline, and the schedules that it has. Must not contain: its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.planning.step_plan import Plan
from pipeflow.planning.transformer import GPT
from pipeflow.schedules import make_schedule, options_of

SINGLE = ("context", "expert")  # the kinds of ranks that Megatron-LM alone has here


class LibraryOptions(NamedTuple):
    """The options of a library for a plan.

    Attributes:
        text: the options as the library reads them.
        notes: sentences on what the options do not say, and on costs that differ from the plan.
    """

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """A library that trains in a pipeline.

    Attributes:
        name: as its authors write it.
        version: the one whose sources the options were compared with.
        schedules: per schedule of pipeflow that it has in the same order, its own name.
        options: the function that writes the options of a plan; it raises UsageError for what the library cannot do.
        recording: what to add so that a step is recorded for `pipeflow explain`.
        single: the kinds of ranks for which `options` has no words; plans for it have one of each.
    """

    name: str
    version: str
    schedules: Mapping[str, str]
    options: Callable[[Plan], LibraryOptions]
    recording: str
    single: tuple[str, ...] = ()


def stages_per_rank(schedule: Schedule) -> int:
    """The number of stages of a rank in one direction."""
    return schedule.placement.num_stages // schedule.placement.num_ranks


def has_order(schedule: Schedule, name: str, **options: int) -> bool:
    """Whether `schedule` has the placement and the order of a named schedule, whatever its own name is."""
    ranks, chunks = schedule.placement.num_ranks, stages_per_rank(schedule)
    if "chunks" in options_of(name):
        options = {"chunks": chunks, **options}
    try:
        if make_schedule(name, ranks=ranks, microbatches=1, **options).placement != schedule.placement:
            return False
        made = make_schedule(name, ranks=ranks, microbatches=schedule.num_microbatches, **options)
    except UsageError:
        return False
    return made.rows == schedule.rows


def no_schedule(library: str, schedule: Schedule, nearest: str) -> UsageError:
    """The error for a schedule that a library does not have. `nearest` is one that it has, with its options."""
    sliced = f" of {schedule.slices} slices" * (schedule.slices > 1)
    return UsageError(
        f"{library} does not have {schedule.name!r} on {schedule.placement.num_ranks} ranks with "
        f"{schedule.num_microbatches} microbatches{sliced}: the nearest that it has is --schedule {nearest}"
    )


def require_language_model(library: str, found: Plan) -> None:
    """Raises UsageError for models that the options of a library do not describe: with frozen weights, for images, with
    a pattern.
    """
    if found.setup.frozen:
        raise UsageError(
            f"the options of {library} are written for weights that learn: plan without --frozen and --lora-rank"
        )
    if not isinstance(found.model, GPT):
        raise UsageError(f"the options of {library} are written for language models, and this model is none")
    if found.model.pattern is not None:
        raise UsageError(
            f"the options of {library} are written for layers of attention with an MLP, and this model has a pattern: "
            "plan without --for"
        )


def require_plain_stages(library: str, found: Plan) -> None:
    """Raises UsageError for context and expert ranks, and for what Megatron-LM alone does with layers."""
    for name in SINGLE:
        if getattr(found.setup, name) > 1:
            raise UsageError(f"options with {name} ranks are written for Megatron-LM, not for {library}: use 1")
    for name in ("recompute_modules", "checkpoint_layers", "offload_layers", "cuda_graphs", "overlap_experts"):
        if getattr(found.setup, name):
            raise UsageError(f"options with {name} are written for Megatron-LM, not for {library}: leave it out")


def order_of_ranks(library: str, found: Plan) -> tuple[str, ...]:
    """The note on a library that puts replicas next to each other, if they are in several nodes."""
    many = min(found.setup.data, len(found.ranks)) > 1
    if found.cluster is None or not many or found.cluster.is_one_node(found.devices):
        return ()
    if found.cluster.further:
        return (
            f"{library} puts the devices of a pipeline rank next to each other: list the nodes of each kind together, "
            "in the order of the plan; transfers and reductions then cross other links",
        )
    return (
        f"{library} puts replicas next to each other and pipeline ranks apart; the plan has it the other way round, so "
        "transfers and reductions cross other links",
    )


def require_reductions(library: str, found: Plan) -> None:
    """Raises UsageError for gradients that stay whole in all microbatches, with divided weights."""
    if found.setup.reduce_once:
        raise UsageError(
            f"{library} reduces gradients in every microbatch: the nearest is a plan without --reduce-once"
        )


def common_notes(library: str, found: Plan) -> tuple[str, ...]:
    """The notes on any library: that it gathers layers ahead in backwards, if the plan does not, and on what the data
    and the model's code have to bring.
    """
    setup, notes = found.setup, []
    if setup.zero == 3 and not setup.prefetch and len(found.ranks) == 1:
        notes.append(f"{library} gathers layers ahead in backwards, too; --prefetch plans that")
    if setup.document:
        notes.append(
            f"documents of {setup.document} tokens have to be packed by the data, and attention to stay in them"
        )
    if setup.eager:
        notes.append("--eager plans layers without fused kernels: leave it out for code that has them or is compiled")
    if setup.head_slices > 1:
        notes.append(
            f"{library} has no option that computes logits in {setup.head_slices} slices: the model's code has to do it"
        )
    return tuple(notes)
