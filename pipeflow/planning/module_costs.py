"""Counted modules: the costs of stages that were counted in a module's forward, not found from the sizes of a
transformer. Must not contain: how they are counted, or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Content
from pipeflow.core.partition import Part
from pipeflow.core.schedule import Schedule
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.estimate import step_plan
from pipeflow.planning.layer_seconds import layer_times
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import StageCosts, physical_of, rates_of
from pipeflow.planning.rank_memory import Held, transferred
from pipeflow.planning.rates import RankGroup, Rates
from pipeflow.planning.setup import Setup
from pipeflow.planning.sharding import StageLayers
from pipeflow.planning.shares import Parameters
from pipeflow.planning.step_plan import StepPlan
from pipeflow.planning.work import DeviceWork, added_bytes

LAYER_OPERATIONS = 16
"""Operations that a GPT's layer launches whose attention is not fused: two norms, four linears, two products of
attention, mask and softmax, activation, three dropouts, two sums, and one to order the heads. `Efficiency` has the time
to launch such a layer.
"""


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """A part of a forward, for one microbatch.

    Attributes:
        name: that of its block, or "".
        work: what it computes.
        operations: how many it launches.
        saved: bytes that it keeps for the backward, by the number of their memory.
        deferred: the inputs of its products with weights, and as many bytes as gradients of their outputs have.
        given: its arguments, which alone are kept where the backward computes it again.
        gradients: the most bytes of the gradients that the backward of one of its operators takes and makes.
        is_block: whether the backward may compute it again.
    """

    name: str
    work: DeviceWork
    operations: int
    saved: Mapping[int, int]
    deferred: Mapping[int, int]
    given: Mapping[int, int]
    gradients: int
    is_block: bool


@dataclass(frozen=True, slots=True)
class CountedStage:
    """A stage of a counted module.

    Attributes:
        pieces: what it computes.
        blocks: its blocks [start, end).
        parameters: sizes of the parameters that it needs, by name.
        sent_bytes: what it sends to the next stage for a microbatch.
    """

    pieces: tuple[ForwardPart, ...]
    blocks: Part
    parameters: Mapping[str, int]
    sent_bytes: float


def piece_seconds(piece: ForwardPart, rates: Rates, setup: Setup) -> tuple[float, float, float]:
    """Seconds of a piece's forward, of its whole backward, and of the part of that for weight gradients. Fused
    attention has the kernel of the setup.
    """
    kept, work = str(setup.checkpoint) if piece.is_block else "none", piece.work
    if work.scores is not None:
        work = work._replace(scores=work.scores._replace(kernel=setup.kernel))
    work = work._replace(added_bytes=added_bytes(work.products, setup))
    return layer_times(rates.seconds(work), rates, kept, launches=piece.operations / LAYER_OPERATIONS)


def counted_plan(
    stages: Sequence[CountedStage],
    far: Mapping[tuple[int, int], float],
    schedule: Schedule,
    setup: Setup,
    cluster: Cluster,
) -> StepPlan:
    """The plan of a module with these stages. `far` has the bytes on each route."""
    placement, rates = schedule.placement, rates_of(cluster, setup)
    mesh = Mesh.of(setup, len(schedule.rows), cluster.devices_per_node)
    costs = [_stage_costs(stage, rates, setup) for stage in stages]
    held = []
    for rank in range(len(schedule.rows)):
        own = [stages[stage] for stage in placement.stages_of(rank)]
        names = {name: size for stage in own for name, size in stage.parameters.items()}
        again, gradients = max((_in_backward(stage, setup) for stage in own), key=sum, default=(0, 0))
        parts = tuple(stage.blocks for stage in own)
        received = transferred(placement, rank, [stage.sent_bytes for stage in stages])
        sizes = tuple(sum(stage.parameters.values()) for stage in own)
        unit = max(size // max(1, end - start) for size, (start, end) in zip(sizes, parts, strict=True))
        counts = Parameters(sum(names.values()), 0), Parameters(unit, 0), Parameters(0, 0)
        held.append(Held(parts, again, gradients, received, tuple(Parameters(size, 0) for size in sizes), *counts))
    tied = _tied(stages, schedule, setup, mesh, rates)
    most = max((each.whole for each in held), key=lambda each: each.total)
    physical = physical_of(costs, placement, setup, mesh, rates, most=most, tied=tied)
    physical = replace(physical, cost=replace(physical.cost, route_bytes=dict(far)))
    return step_plan(schedule, setup, physical.cost, held, cluster, physical)


def _stage_costs(stage: CountedStage, rates: Rates, setup: Setup) -> StageCosts:
    times = [piece_seconds(piece, rates, setup) for piece in stage.pieces]
    forward, backward, weight = (sum(column) for column in zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)
    saved: dict[int, int] = {}
    deferred: dict[int, int] = {}
    for piece in stage.pieces:
        saved |= _kept(piece, setup)
        deferred |= piece.deferred
    held, blocks = sum(stage.parameters.values()), max(1, stage.blocks[1] - stage.blocks[0])
    return StageCosts(
        {Kind.F: forward, Kind.I: backward - weight, Kind.W: weight},
        0.0,
        {Content.SAVED: sum(saved.values()), Content.DEFERRED: sum(deferred.values())},
        stage.sent_bytes,
        Parameters(held, 0),
        StageLayers(blocks, Parameters(held // blocks, 0), Parameters(0, 0), forward / blocks, backward / blocks),
        Parameters(0 if setup.frozen else held, 0),
    )


def _kept(piece: ForwardPart, setup: Setup) -> Mapping[int, int]:
    """The bytes that a forward keeps of a piece, by the number of their memory."""
    return piece.given if setup.checkpoint == "full" and piece.is_block else piece.saved


def _in_backward(stage: CountedStage, setup: Setup) -> tuple[int, int]:
    """The most bytes that a backward has beside what its forward kept: of a piece computed again, and of gradients."""
    found, held = [(0, 0)], dict[int, int]()
    whole = {key: size for piece in stage.pieces for key, size in _kept(piece, setup).items()}
    for piece in stage.pieces:
        held |= (kept := _kept(piece, setup))
        freed = sum(whole.values()) - sum(held.values())
        again = sum(size for key, size in piece.saved.items() if key not in kept)
        if (more := again + piece.gradients - freed) > 0:
            found.append((min(again, more), more - min(again, more)))
    return max(found, key=sum)


def _tied(stages: Sequence[CountedStage], schedule: Schedule, setup: Setup, mesh: Mesh, rates: Rates) -> float:
    """Seconds to sum the gradients of parameters that stages on several ranks share."""
    sizes = {name: size for stage in stages for name, size in stage.parameters.items()}
    shared: dict[tuple[int, ...], int] = {}
    for name, size in sizes.items():
        holders = [index for index, stage in enumerate(stages) if name in stage.parameters]
        ranks = tuple(sorted({rank for index in holders for rank in schedule.placement.ranks_of(index)}))
        if len(holders) > 1 and len(ranks) > 1:
            shared[ranks] = shared.get(ranks, 0) + size
    groups = {ranks: RankGroup(len(ranks), 1 if mesh.crosses(ranks[0], ranks[-1]) else len(ranks)) for ranks in shared}
    return sum(rates.gradient_sum(groups[ranks], setup.precision.gradient * size) for ranks, size in shared.items())
