"""plan_module: the plan of any module under a schedule, from one forward on fake tensors. Must not contain: how
operations are counted, or what they cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
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
from pipeflow.planning.module_costs import CountedStage, ForwardPart, counted_plan, piece_seconds
from pipeflow.planning.physical import rates_of
from pipeflow.planning.pricing.operators import Counter
from pipeflow.planning.rates import Rates
from pipeflow.planning.setup import Setup
from pipeflow.planning.step_plan import StepPlan

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


class Staged(NamedTuple):
    """A counted module cut into stages: these, the bytes on each route, the names of the cuts, and all pieces."""

    stages: tuple[CountedStage, ...]
    far: dict[tuple[int, int], float]
    names: tuple[str, ...]
    pieces: tuple[ForwardPart, ...]


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
        read = _read(planner, example)
        entries = {name: tree_map(lambda leaf: _given(leaf, dtype), each) for name, each in read.items()}
        counters: list[Counter] = []

        def counting(flow: Flow, fakes: Fakes) -> Counter:
            counters.append(Counter(flow, list(fakes.module.parameters())))
            return counters[-1]

        trace, found = planner.observed(entries, counting)
        return cls(typed, entries, trace, found, counters[-1], blocks)

    def plan(self, schedule: Schedule, setup: Setup, cluster: Cluster, cuts: Cuts = None) -> ModulePlan:
        """The plan under a schedule, for the microbatch that was counted. Raises UsageError as `plan_module`."""
        if cuts is None:
            pieces = _pieces(self.counter, self.found, [])
            cuts = _weights(pieces, rates_of(cluster, setup), setup)
        key = schedule.placement, cuts if cuts is None or isinstance(cuts, str) else tuple(cuts)
        if key not in self.staged:
            self.staged[key] = self._staged(schedule.placement, cuts)
        staged = self.staged[key]
        step = counted_plan(staged.stages, staged.far, schedule, setup, cluster)
        known: dict[str, Any] = {each.name: getattr(step, each.name) for each in fields(step)}
        total = sum(parameter.numel() for parameter in self.typed.parameters())
        return ModulePlan(cuts=staged.names, pieces=staged.pieces, parameters_total=total, **known)

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
        return Staged(tuple(stages), far, tuple(labels[cut.index] for cut in made), tuple(pieces))


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


def _read(planner: Planner, example: object) -> dict[str, Any]:
    entries, _ = planner.entries.of(example)
    return entries


def _given(leaf: object, dtype: torch.dtype) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf.detach().cpu()
    return made.to(dtype) if leaf.is_floating_point() else made


def _weights(pieces: Sequence[ForwardPart], rates: Rates, setup: Setup) -> list[float]:
    """The seconds of each block, including the parts before the first and after the last block."""
    before, *blocks, after = (sum(piece_seconds(piece, rates, setup)[:2]) for piece in pieces)
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
