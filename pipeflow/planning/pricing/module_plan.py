"""plan_module: the plan of any module under a schedule, from one forward on fake tensors. Must not contain: how
operations are counted, and what the parts of a transformer cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.engine.stages.blocks import Blocks, Cuts, labels_of
from pipeflow.engine.stages.copies import Fakes, copied
from pipeflow.engine.stages.flow import Flow
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.stages.trace import Call, Trace
from pipeflow.engine.torch_private.trees import tree_map
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.estimate import step_plan
from pipeflow.planning.layer_seconds import layer_times
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import Physical, StageCosts, physical_of, rates_of
from pipeflow.planning.pricing.operators import Counter, ForwardPart
from pipeflow.planning.rank_memory import Held, transferred
from pipeflow.planning.rates import RankGroup, Rates
from pipeflow.planning.setup import Setup
from pipeflow.planning.sharding import StageLayers
from pipeflow.planning.shares import Parameters
from pipeflow.planning.step_plan import StepPlan
from pipeflow.planning.work import added_bytes

LAYER_OPERATIONS = 16
"""Operations that a GPT's layer launches whose attention is not fused: two norms, four linears, two products of
attention, mask and softmax, activation, three dropouts, two sums, and one to order the heads. `Efficiency` has the time
to launch such a layer.
"""
_DTYPES = {"float32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModulePlan(StepPlan):
    """The result of `plan_module`. Times are in seconds. The `parts` of a rank are its blocks [start, end).

    Attributes:
        cuts: the names of the last blocks of all stages but the last, for `Pipeline.from_module(cuts=...)`.
        pieces: the parts of the module whose operations were counted, in order: before the first block, each block, and
            after the last one.
        parameters_total: the number of parameters of the whole module, each counted once.
        schedule, setup, cost, timeline, ranks, cluster, step_parts: as in `Plan`.
    """

    cuts: tuple[str, ...]
    pieces: tuple[ForwardPart, ...]
    parameters_total: int


def plan_module(
    module: nn.Module,
    schedule: Schedule,
    example: object,
    setup: Setup | None = None,
    *,
    cluster: Cluster,
    cuts: Cuts = None,
    blocks: Blocks = None,
) -> ModulePlan:
    """The cost of training a module under `schedule` on a `cluster`. The module's forward runs once on fake tensors,
    which counts its operations; the stages are those of `Pipeline.from_module`. Neither takes memory for parameters or
    activations, so the module may be on the meta device. It is not changed.

    Args:
        module: the whole module, in training or evaluation as it will run.
        schedule: its order.
        example: one microbatch, in a form that `Pipeline.from_module` takes. Tensors on the meta device count as zeros.
        setup: copies of the pipeline, precision, recomputation of whole blocks, and ZeRO; by default one copy in bf16.
            Parameters and floating-point inputs are counted in this precision. All parameters count as trained.
        cluster: the devices.
        cuts, blocks: as in `Pipeline.from_module`. By default the slowest stage takes as little time as possible.

    Raises UsageError for a module that cannot be cut, and for an example that its forward does not take. Also raises it
    for a setup with tensor ranks or with sizes that follow from the example, and for a cluster as `plan` does.
    """
    setup = Setup() if setup is None else setup
    return CountedModule.of(module, example, setup, blocks).plan(schedule, setup, cluster, cuts)


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


Staged = tuple[list[CountedStage], dict[tuple[int, int], float], tuple[str, ...], list[ForwardPart]]
"""A counted module cut into stages: these, the bytes on each route, the names of the cuts, and all pieces."""


@dataclass(frozen=True, slots=True)
class CountedModule:
    """A module whose forward was counted for one microbatch, from which plans under any schedule are made.

    Attributes:
        typed: a copy without memory, in the precision of the plans.
        entries: the microbatch.
        trace, found: the calls of the forward, and the blocks among them.
        counter: what was counted.
        blocks: as in `plan_module`.
        staged: its stages by placement and cuts, made when they are first needed.
    """

    typed: nn.Module
    entries: dict[str, Any]
    trace: Trace
    found: list[Call]
    counter: Counter
    blocks: Blocks
    staged: dict[object, Staged] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, example: object, setup: Setup, blocks: Blocks = None) -> CountedModule:
        """Counts one forward, in the precision of the setup. Raises UsageError as `plan_module`."""
        _require_plain(setup)
        if not isinstance(module, nn.Module):
            raise UsageError(f"plan_module takes an nn.Module, got {type(module).__name__}")
        dtype = _DTYPES.get(setup.precision.name.removesuffix("-mixed"), torch.bfloat16)
        typed = _typed(module, dtype)
        planner = Planner(typed, 1, blocks=blocks)
        read, _ = planner.entries.of(example)
        entries = {name: tree_map(lambda leaf: _given(leaf, dtype), each) for name, each in read.items()}
        counters: list[Counter] = []

        def counting(flow: Flow, fakes: Fakes) -> Counter:
            counters.append(Counter(flow, list(fakes.module.parameters())))
            return counters[-1]

        trace, found = planner.observed(entries, counting)
        return cls(typed, entries, trace, found, counters[-1], blocks)

    def plan(self, schedule: Schedule, setup: Setup, cluster: Cluster, cuts: Cuts = None) -> ModulePlan:
        """The plan under a schedule, for the microbatch that was counted. Raises UsageError as `plan_module`."""
        cluster = cluster.alone(len(schedule.rows) * setup.replicas)
        if cuts is None:
            pieces = _pieces(self.counter, self.found, [])
            cuts = _weights(pieces, rates_of(cluster, setup), setup)
        key = schedule.placement, cuts if cuts is None or isinstance(cuts, str) else tuple(cuts)
        if key not in self.staged:
            self.staged[key] = self._staged(schedule.placement, cuts)
        stages, far, names, pieces = self.staged[key]
        physical, held = _counted_costs(stages, schedule, setup, cluster)
        physical = replace(physical, cost=replace(physical.cost, route_bytes=dict(far)))
        total = sum(parameter.numel() for parameter in self.typed.parameters())
        further = {"cuts": names, "pieces": tuple(pieces), "parameters_total": total}
        return step_plan(ModulePlan, schedule, setup, physical.cost, held, cluster, physical, **further)

    def _staged(self, placement: Placement, cuts: Cuts) -> Staged:
        planner = Planner(self.typed, placement.num_stages, cuts=cuts, blocks=self.blocks, placement=placement)
        plan = planner.plan(self.entries)
        made = [self.trace.calls[cut.index] for cut in plan.cuts]
        pieces = _pieces(self.counter, self.found, made)
        sizes = {name: parameter.numel() for name, parameter in self.typed.named_parameters()}
        stages = _stages(plan, pieces, _points(self.found, made), self.found, made, sizes)
        far: dict[tuple[int, int], float] = {route: float(plan.bytes_between(*route)) for route in plan.routes}
        calls = self.trace.calls[1:]
        labels = dict(zip((call.index for call in calls), labels_of(calls), strict=True))
        return stages, far, tuple(labels[cut.index] for cut in made), pieces


def _require_plain(setup: Setup) -> None:
    if setup.tensor > 1 or setup.sequence_parallel:
        raise UsageError(
            f"plan_module plans modules that are not split over tensor ranks, got tensor={setup.tensor}: use tensor=1, "
            "or plan a GPT or ViT of these sizes with plan"
        )
    if setup.context > 1 or setup.expert > 1:
        raise UsageError("plan_module plans no context or expert ranks: use context=1 and expert=1, or plan a GPT")
    if setup.checkpoint in ("selective", "op") or setup.keep_scores:
        raise UsageError(
            "the module's own forward decides what attention keeps: use checkpoint 'none' or 'full', and no keep_scores"
        )
    if setup.microbatch_size != 1 or setup.sequence is not None:
        raise UsageError("the example is one microbatch and has its sizes: leave out microbatch_size and sequence")


def _typed(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters are on the meta device, with floating-point numbers of this type."""

    def typed(tensor: Tensor) -> torch.dtype:
        return dtype if tensor.is_floating_point() else tensor.dtype

    instead: dict[int, Tensor] = {id(each): each.to(typed(each)) for each in module.buffers()}
    for each in module.parameters():
        meta = torch.empty_strided(each.shape, each.stride(), dtype=typed(each), device="meta")
        instead[id(each)] = nn.Parameter(meta, requires_grad=each.requires_grad)
    return copied(module, instead)


def _given(leaf: object, dtype: torch.dtype) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf.detach().cpu()
    return made.to(dtype) if leaf.is_floating_point() else made


def _weights(pieces: Sequence[ForwardPart], rates: Rates, setup: Setup) -> list[float]:
    """The seconds of each block, including the parts before the first and after the last block."""
    before, *blocks, after = (sum(_piece_seconds(piece, rates, setup)[:2]) for piece in pieces)
    blocks[0] += before
    blocks[-1] += after
    return blocks


def _points(blocks: Sequence[Call], cuts: Sequence[Call]) -> list[int]:
    """The times at which pieces end: the first block begins, and each block and each stage ends."""
    return sorted({blocks[0].enter, *(call.exit for call in (*blocks, *cuts))})


def _pieces(counter: Counter, blocks: Sequence[Call], cuts: Sequence[Call]) -> list[ForwardPart]:
    points = _points(blocks, cuts)
    ends = {bisect_right(points, call.exit - 1): call for call in blocks}
    names = {index: call.name for index, call in ends.items()}
    return counter.pieces(points, names, {index: call.given for index, call in ends.items()})


def _stages(
    plan: CutPlan,
    pieces: Sequence[ForwardPart],
    points: Sequence[int],
    blocks: Sequence[Call],
    cuts: Sequence[Call],
    sizes: dict[str, int],
) -> list[CountedStage]:
    """The stages of the plan, of which the first ones may be empty."""
    exits = [call.exit for call in blocks]
    ends = [0] * (len(plan.stages) - len(cuts) - 1) + [call.exit for call in cuts]
    starts, found = [0, *ends], []
    for stage, (start, end) in enumerate(zip(starts, [*ends, None], strict=True)):
        first = bisect_right(points, start) if start else 0
        last = len(pieces) if end is None else bisect_right(points, end - 1) + 1 if end else 0
        part = (bisect_right(exits, start), len(blocks) if end is None else bisect_right(exits, end))
        sent = float(plan.bytes_between(stage, stage + 1)) if end is not None else 0.0
        owned = {name: sizes[name] for name in sorted(plan.stages[stage].owned)}
        found.append(CountedStage(tuple(pieces[first:last]), part, owned, sent))
    return found


def _piece_seconds(piece: ForwardPart, rates: Rates, setup: Setup) -> tuple[float, float, float]:
    """Seconds of a piece's forward, of its whole backward, and of the part of that for weight gradients. Fused
    attention has the kernel of the setup.
    """
    kept, work = str(setup.checkpoint) if piece.is_block else "none", piece.work
    if work.scores is not None:
        work = work._replace(scores=work.scores._replace(kernel=setup.kernel))
    work = work._replace(added_bytes=added_bytes(work.products, setup))
    return layer_times(rates.seconds(work), rates, kept, launches=piece.operations / LAYER_OPERATIONS)


def _counted_costs(
    stages: Sequence[CountedStage], schedule: Schedule, setup: Setup, cluster: Cluster
) -> tuple[Physical, list[Held]]:
    """The costs of these stages, and what the ranks hold."""
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
        whole, pair, ends = Parameters(sum(names.values()), 0), (Parameters(unit, 0),) * 2, Parameters(0, 0)
        each, tables = tuple(Parameters(size, 0) for size in sizes), (0,) * len(own)
        held.append(Held(parts, again, gradients, received, each, whole, pair, ends, tables))
    tied = _tied(stages, schedule, setup, mesh, rates)
    most = max((each.whole for each in held), key=lambda each: each.total)
    return physical_of(costs, placement, setup, mesh, rates, most=most, tied=tied), held


def _stage_costs(stage: CountedStage, rates: Rates, setup: Setup) -> StageCosts:
    times = [_piece_seconds(piece, rates, setup) for piece in stage.pieces]
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
