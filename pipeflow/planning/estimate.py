"""Estimate: the cost of a layout, on each rank and as a step, and where the time of a step goes. Must not contain: how
it is shown.

A breakdown tells the computations of the busiest rank apart by what they would take without one kind of work after the
other. So a kind has the time that it adds: what hides behind other work adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pipeflow.core.action import Kind
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError, require_type
from pipeflow.core.factors import FactorsLike, factors_of
from pipeflow.core.partition import Cut
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.timeline import Timeline
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.kept import with_slice_buffers
from pipeflow.planning.physical import Physical, layer_forward, physical_costs, stage_costs
from pipeflow.planning.rank_memory import Held, RankPlan, held_by, rank_plan, stage_gradients, with_gradients
from pipeflow.planning.rates import KINDS
from pipeflow.planning.setup import Setup
from pipeflow.planning.sharding import require_pipeline
from pipeflow.planning.shares import sequence_of, shares_of, slice_parts, stage_layers
from pipeflow.planning.step_plan import Plan, StepParts, StepPlan
from pipeflow.planning.transformer import GPT, ViT

AnyPlan = TypeVar("AnyPlan", bound=StepPlan)
MEANINGS = {
    "products": "matrix products with weights, and those of scans",
    "attention": "products of queries, keys and values, and scores that are stored",
    "elementwise": "operations that the memory's bandwidth limits",
    "recomputation": "what backwards compute again",
    "launches": "waiting for the host to launch operations",
    "tensor": "communication of tensor ranks",
    "experts": "tokens on their way to experts and back",
    "context": "waiting for keys and values of other context ranks",
    "processors": "waiting for a processor that ranks share",
    "sharding": "gathers and reductions of divided weights and gradients",
    "transfer": "waiting for activations and gradients on their way",
    "bubble": "waiting for other stages",
    "reduction": "sums of gradients after the last backward",
    "optimizer": "the optimizer's step",
}
"""The parts of a breakdown, in their order."""
AROUND = ("sharding", "transfer", "bubble", "reduction", "optimizer")
"""Parts of a step besides what its busiest rank computes."""
LEAST = 1e-9  # parts under this share of a step are roundings
NOTED = 1e-4  # hidden time is told from this share on


def plan(
    model: Transformer,
    schedule: Schedule,
    setup: Setup | None = None,
    *,
    flops: float | None = None,
    cluster: Cluster | None = None,
    cut: Cut = "uniform",
    microbatch_factors: FactorsLike = (),
) -> Plan:
    """The cost of training `model` under `schedule` in a `setup`, by default with one device per pipeline rank.
    `stage_layers` divides the layers among the stages; the first and the last stage also have the tables and the head.

    With a `cluster`, times are in seconds and everything is counted: computations, launches, communication of tensor
    ranks, transfers, reductions of gradients and the optimizer. Computations have the efficiency that their sizes
    reach. `benchmarks/planner.py` compares such plans with measured steps. With `flops`, the operations per second that
    one device reaches, times are in seconds too, and communication is free. `microbatch_factors`, as in `CostModel`,
    say how microbatches differ.

    >>> from pipeflow import GPT, make_schedule
    >>> found = plan(GPT.named("gpt3-175b"), make_schedule("1f1b", ranks=8, microbatches=64), Setup(tensor=8))
    >>> found.ranks[0].parameters, round(found.makespan_bubble_ratio, 3), round(found.even_makespan_bubble_ratio, 3)
    (2799335424, 0.096, 0.099)

    Raises UsageError for a model that does not fit the setup or the schedule's stages, for a precision that a device
    does not have, for more devices than the cluster has, for ZeRO-2 on several pipeline ranks, and for both `flops` and
    `cluster`.
    """
    setup, physical = Setup() if setup is None else setup, None
    require_inputs(model, setup, cluster)
    require_schedule(schedule)
    require_sliceable(model, setup, schedule.slices)
    if cluster is None:
        cost = stage_costs(model, schedule.placement, setup, flops=flops, cut=cut)
        share = model.attention_flops(sequence_of(model, setup)) / layer_forward(model, setup)
        if schedule.slices > 1:
            shares = shares_of(model, stage_layers(model, schedule.placement, cut))
            cost = with_slice_buffers(replace(cost, attention=share), model, setup, shares)
    elif flops is not None:
        raise UsageError("flops and cluster both give the speed of a device: pass only one of them")
    else:
        cluster = cluster.used(len(schedule.rows) * setup.tensor * setup.replicas)
        physical = physical_costs(model, schedule.placement, setup, cluster, cut=cut, slices=schedule.slices)
        cost = physical.cost
    cost = replace(cost, microbatch_factors=factors_of(microbatch_factors, len(cost.forward)))
    physical = physical and replace(physical, cost=cost)
    parts = stage_layers(model, schedule.placement, cut)
    many = schedule.num_microbatches
    held = [held_by(model, setup, schedule.placement, parts, rank, many) for rank in range(len(schedule.rows))]
    return step_plan(Plan, schedule, setup, cost, held, cluster, physical, model=model, flops=flops)


def require_sliceable(model: Transformer, setup: Setup, slices: int) -> None:
    """Raises UsageError unless sequences of `model` can be computed in so many slices. In a ring of context ranks, the
    keys of earlier slices go around again, which no plan counts.
    """
    if slices == 1:
        return
    if not isinstance(model, GPT):
        raise UsageError(f"slices={slices} need a causal model, and {type(model).__name__} is none: use slices=1")
    if model.pattern is not None:
        raise UsageError(f"slices={slices} are planned for models without a pattern of layers: use slices=1")
    if setup.context > 1 and setup.context_kind == "ring":
        raise UsageError(
            f"no plan has slices={slices} in a ring of context ranks: use context_kind 'gather' or 'all-to-all', or "
            "slices=1"
        )
    if setup.context > 1 and setup.zero > 1:
        raise UsageError(f"slices={slices} run under fully_shard without context ranks alone: use zero=1 or context=1")
    tokens = sequence_of(model, setup)
    if tokens < slices * slice_parts(setup):
        raise UsageError(f"slices={slices} are too many for a sequence of {tokens} tokens: use fewer")


def step_plan(
    kind: type[AnyPlan],
    schedule: Schedule,
    setup: Setup,
    cost: CostModel,
    held: Sequence[Held],
    cluster: Cluster | None = None,
    physical: Physical | None = None,
    **further: Any,
) -> AnyPlan:
    """The step of `schedule` at the costs of the stages, whose ranks hold `held`. `physical` are the same costs with
    what else a step takes on a `cluster`. `further` are the fields that plans of this `kind` have besides.
    """
    require_pipeline(setup.zero, len(schedule.rows))
    timeline = simulate(schedule, cost) if physical is None else physical.timeline(schedule, cost)
    computing = [sum(each.end - each.start for each in row) for row in timeline.on(Stream.COMPUTE)]
    idle = [1 - time / timeline.makespan for time in computing]
    ranks = tuple(
        _rank_plan(schedule, setup, cost, rank, held[rank], timeline.peak_bytes[rank], idle[rank])
        for rank in range(len(idle))
    )
    parts = None if physical is None else _step_parts(schedule, physical, timeline, computing)
    return kind(schedule, setup, cost, timeline, ranks, cluster, parts, **further)


def _rank_plan(
    schedule: Schedule, setup: Setup, cost: CostModel, rank: int, held: Held, kept: float, idle: float
) -> RankPlan:
    """The plan of a rank that keeps `kept` bytes; where gradients come and go, those at the fullest moment of both."""
    gradients = stage_gradients(setup, schedule.placement, rank, held)
    if not gradients or cost.microbatch_factors or schedule.slices > 1:
        return rank_plan(setup, schedule.placement, rank, held, kept=kept, idle=idle)
    kept, whole = with_gradients(list(schedule.actions(rank)), cost.sizes, gradients)
    return rank_plan(setup, schedule.placement, rank, held, kept=kept, idle=idle, gradients=whole)


def _step_parts(schedule: Schedule, physical: Physical, timeline: Timeline, computing: list[float]) -> StepParts:
    cost, busiest = physical.cost, max(range(len(computing)), key=computing.__getitem__)
    whole = replace(cost, unshard=())
    gathered = physical.timeline(schedule, whole) if cost.unshard else timeline
    free = physical.timeline(schedule, replace(whole, latency=0.0, bandwidth=math.inf, links={}))
    fastest = min(free.makespan, gathered.makespan)  # ranks that share processors may get out of each other's way
    reduced = physical.timeline(schedule.with_reductions())
    forwards = [action for action in schedule.actions(busiest) if action.kind is Kind.F]

    def of_all(seconds: Sequence[float]) -> float:
        each_slice = [seconds[each.stage] * cost.factor(each.stage, each.microbatch) for each in forwards]
        return sum(each_slice) / schedule.slices

    tensor = min(computing[busiest], of_all(physical.communication))
    sharding = min(computing[busiest] - tensor, of_all(physical.sharding))
    return StepParts(
        compute=computing[busiest] - tensor - sharding,
        tensor=tensor,
        sharding=sharding + max(0.0, timeline.makespan - gathered.makespan),
        bubble=fastest - computing[busiest],
        transfer=gathered.makespan - fastest,
        reduction=max(0.0, reduced.makespan - timeline.makespan) + physical.tied,
        optimizer=physical.optimizer,
    )


def require_inputs(model: object, setup: object, cluster: object) -> None:
    """Raises UsageError with the line to write, such as `model_named("gpt3-175b")` for a name; None is no cluster."""
    if not isinstance(model, Transformer):
        require_type("model", model, (GPT, ViT), f"model_named({model!r}) has a model by its name")
    require_type("setup", setup, Setup, "Setup() has the usual settings")
    if cluster is not None:
        require_type("cluster", cluster, Cluster, f"Cluster.of({cluster!r}) has a cluster by the name of its device")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The time of a step of a plan in parts, in seconds.

    Attributes:
        parts: by the names of MEANINGS, the time that each part adds to the step, without those that add nothing. Their
            sum is the step.
        hidden: by the same names, the time of communication that runs beside computations and adds nothing.
        rank: the pipeline rank whose computations are told apart: the busiest one.
    """

    parts: dict[str, float]
    hidden: dict[str, float]
    rank: int

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.parts.values())


def breakdown(found: Plan) -> Breakdown:
    """The parts of a plan's step. Raises UsageError for a plan without a cluster, whose times are not in seconds."""
    if found.cluster is None or found.step_parts is None or found.step_seconds is None:
        raise UsageError("a plan without a device has no seconds to break down: say which one, with --device")
    rank = min(found.ranks, key=lambda each: each.idle).rank
    runs = _runs(found, rank)
    hides = found.setup.overlaps and found.setup.zero < 3
    alone = replace(found.setup, zero=0, shard_ranks=None, overlap=hides)  # without hidden gathers
    costs = [_without(found, alone, KINDS[present:]) for present in range(len(KINDS) + 1)]
    computed = [_computed(each, runs) for each in costs]
    parts = {kind: computed[place + 1] - computed[place] for place, kind in enumerate(KINDS)}
    parts["recomputation"] += _again(found, rank)
    parts |= {name: seconds for name, seconds in found.step_parts._asdict().items() if name in AROUND}
    parts["processors"] = found.step_seconds - sum(parts.values())
    tiny = LEAST * found.step_seconds
    named = {name: parts[name] for name in MEANINGS if abs(parts.get(name, 0.0)) > tiny}
    hidden = _in_all(found, _without(found, found.setup, ()), runs, rank)
    beside = {
        name: all_ - parts[name] for name, all_ in hidden.items() if all_ - parts[name] > NOTED * found.step_seconds
    }
    return Breakdown(named, beside, rank)


def _without(found: Plan, setup: Setup, free: Sequence[str]) -> Physical:
    """The costs of a plan in a `setup`, if these kinds of work were free."""
    assert found.cluster is not None
    placement, slices = found.schedule.placement, found.schedule.slices
    return physical_costs(
        found.model, placement, setup, found.cluster, cut=found.cut, free=frozenset(free), slices=slices
    )


def _runs(found: Plan, rank: int) -> dict[int, float]:
    """Per stage of a rank, how many microbatches it computes, each counted as its factor."""
    runs = dict.fromkeys(found.schedule.placement.stages_of(rank), 0.0)
    for action in found.schedule.actions(rank):
        if action.kind is Kind.F:
            runs[action.stage] += found.cost.factor(action.stage, action.microbatch) / found.schedule.slices
    return runs


def _computed(physical: Physical, runs: dict[int, float]) -> float:
    """The seconds in which a rank computes so many microbatches of its stages."""
    cost = physical.cost
    return sum(
        count * (cost.forward[stage] + cost.backward_input[stage] + cost.backward_weight[stage])
        for stage, count in runs.items()
    )


def _again(found: Plan, rank: int) -> float:
    """The seconds of forwards that the schedule computes again on a rank."""
    again = (each for each in found.schedule.actions(rank) if each.kind is Kind.C)
    cost = found.cost
    seconds = sum(cost.durations[Kind.C][each.stage] * cost.factor(each.stage, each.microbatch) for each in again)
    return seconds / found.schedule.slices


def _in_all(found: Plan, physical: Physical, runs: dict[int, float], rank: int) -> dict[str, float]:
    """The seconds of a rank's communication, hidden or not."""
    tensor = sum(count * physical.communication[stage] for stage, count in runs.items())
    return {"tensor": tensor, "reduction": sum(physical.cost.reduce[stage] for stage in runs) + physical.tied}
