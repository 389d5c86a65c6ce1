"""Estimate: the cost of a layout, on each rank and as a step. Must not contain: how it is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError, require_type
from pipeflow.core.partition import Cut
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.timeline import Timeline
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import Physical, physical_costs, stage_costs
from pipeflow.planning.rank_memory import Held, RankPlan, held_by, rank_plan, stage_gradients
from pipeflow.planning.schedule_peaks import with_gradients
from pipeflow.planning.setup import Setup
from pipeflow.planning.sharding import require_pipeline
from pipeflow.planning.shares import stage_layers
from pipeflow.planning.step_plan import Plan, StepParts, StepPlan
from pipeflow.planning.transformer import GPT, ViT


def plan(
    model: Transformer,
    schedule: Schedule,
    setup: Setup | None = None,
    *,
    flops: float | None = None,
    cluster: Cluster | None = None,
    cut: Cut = "uniform",
    microbatch_factors: tuple[float, ...] = (),
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

    Raises UsageError for a model that does not fit the setup or the schedule's stages, for a precision that the device
    does not have, for ZeRO-2 on several pipeline ranks, and for both `flops` and `cluster`.
    """
    setup, physical = Setup() if setup is None else setup, None
    require_inputs(model, setup, cluster)
    require_schedule(schedule)
    if cluster is None:
        cost = stage_costs(model, schedule.placement, setup, flops=flops, cut=cut)
    elif flops is not None:
        raise UsageError("flops and cluster both give the speed of a device: pass only one of them")
    else:
        mesh = Mesh.of(setup, len(schedule.rows), cluster.devices_per_node)
        physical = physical_costs(model, schedule.placement, setup, mesh, cluster, cut=cut)
        cost = physical.cost
    cost = replace(cost, microbatch_factors=microbatch_factors)
    physical = physical and replace(physical, cost=cost)
    parts = stage_layers(model, schedule.placement, cut)
    many = schedule.num_microbatches
    held = [held_by(model, setup, schedule.placement, parts, rank, many) for rank in range(len(schedule.rows))]
    step = step_plan(schedule, setup, cost, held, cluster, physical)
    known: dict[str, Any] = {each.name: getattr(step, each.name) for each in fields(step)}
    return Plan(model=model, flops=flops, **known)


def step_plan(
    schedule: Schedule,
    setup: Setup,
    cost: CostModel,
    held: Sequence[Held],
    cluster: Cluster | None = None,
    physical: Physical | None = None,
) -> StepPlan:
    """The step of `schedule` at the costs of the stages, whose ranks hold `held`. `physical` are the same costs with
    what else a step takes on a `cluster`.
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
    return StepPlan(schedule, setup, cost, timeline, ranks, cluster, parts)


def _rank_plan(
    schedule: Schedule, setup: Setup, cost: CostModel, rank: int, held: Held, kept: float, idle: float
) -> RankPlan:
    """The plan of a rank that keeps `kept` bytes; where gradients come and go, those at the fullest moment of both."""
    gradients = stage_gradients(setup, schedule.placement, rank, held)
    if not gradients or cost.microbatch_factors:
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
    factors = cost.microbatch_factors or (1,) * schedule.num_microbatches

    def of_all(seconds: Sequence[float]) -> float:
        return sum(seconds[each.stage] * factors[each.microbatch] for each in forwards)

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
