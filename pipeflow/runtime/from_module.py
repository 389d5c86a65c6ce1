"""Makes a rank's part of a Pipeline from a whole module: its stages, split over the tensor ranks, their ties, and the
module's own loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.deferral.compile_backend import is_compiled
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.parallel.transport.group import Unconnected
from pipeflow.runtime.arguments import require_ranks
from pipeflow.runtime.divided import Divided
from pipeflow.runtime.gradients.ties import PipelineSharedModuleWrapper
from pipeflow.runtime.microbatch import Batch, as_batch
from pipeflow.stages.blocks import Blocks, Cuts
from pipeflow.stages.entries import LABELS
from pipeflow.stages.loss import Made, all_counted, own_loss, weigh_by
from pipeflow.stages.plan import CutPlan
from pipeflow.stages.planner import Planner
from pipeflow.stages.stage import ModuleStage
from pipeflow.stages.trace import Trace
from pipeflow.tensor.module_sharding import shard
from pipeflow.tensor.random import share_default_state
from pipeflow.tensor.rules import Rule


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of which a Pipeline is made.

    Attributes:
        chunks: stages of this rank.
        plan: plan of the example batch.
        read: function that splits a batch into entries and labels.
        criterion: the module's own loss; None if it computes none.
        weigh: function that gives the weight of a microbatch in the loss; None for its number of samples.
        knows_weights: False if the loss may weigh microbatches otherwise, which could not be read from it.
    """

    chunks: nn.ModuleList
    plan: CutPlan
    read: Callable[[object], tuple[dict[str, Any], object]]
    criterion: Callable[..., Tensor] | None
    weigh: Callable[..., float] | None
    knows_weights: bool = True

    def priced(self, cost: CostModel | None) -> CostModel | None:
        """The cost model, with the bytes that pass between the stages added if it has none."""
        if cost is None or cost.activation_bytes:
            return cost
        plan, last = self.plan, len(self.plan.stages) - 1
        near = [float(plan.bytes_between(stage, stage + 1)) for stage in range(last)]
        far: dict[tuple[int, int], float] = {route: float(plan.bytes_between(*route)) for route in plan.routes}
        return replace(cost, activation_bytes=(*near, 0.0), route_bytes=far)


def parts_of(
    module: nn.Module,
    schedule: Schedule,
    example: object,
    context: Context,
    *,
    cuts: Cuts,
    blocks: Blocks,
    autocast: torch.dtype | None,
    rules: Sequence[Rule],
    has_criterion: bool,
) -> Parts:
    """This rank's parts; all ranks make theirs together. Arguments are those of `Pipeline.from_module`.

    Raises UsageError for a module that cannot be cut, for an example batch that cannot be split, and if the ranks were
    given different modules, examples or cuts.
    """
    _require_plain(module)
    require_ranks(schedule, context)
    placement, device = schedule.placement, context.device
    planner = Planner(
        module,
        placement.num_stages,
        device=device,
        cuts=cuts,
        blocks=blocks,
        placement=placement,
        has_criterion=has_criterion,
    )
    example = example.microbatches[0] if isinstance(example, Divided) else example
    batch = as_batch(example, schedule.num_microbatches, device, planner.entries.of)
    entries = counted(batch.split(batch.inputs)[0])
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        plan = planner.plan(entries)
        sized = _sized(plan, planner, module, entries, rules, context.tensor_size)
    _require_same(plan, context)
    own = placement.stages_of(context.pipeline_rank)
    stages = [ModuleStage(module, stage, planner, plan, device) for stage in own]
    shard(*(stage.root for stage in stages), rules=rules, group=context.tensor)
    share_default_state(context.tensor, device)
    _tie(module, plan, placement, context.pipeline_rank)
    chunks = nn.ModuleList(stages)
    if plan.trace.loss is None:
        return Parts(chunks, sized, planner.entries.of, None, None)
    other = cache(partial(_other_loss, batch, planner, module))
    weigh, is_certain = weigh_by(plan.trace.loss, entries.get(LABELS), batch.sizes[0], other)
    return Parts(chunks, sized, planner.entries.of, own_loss, weigh, knows_weights=is_certain)


def _require_plain(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"from_module takes an nn.Module, got {type(module).__name__}")
    compiled = next((name or "the module" for name, each in module.named_modules() if is_compiled(each)), None)
    if compiled is not None:
        raise UsageError(
            f"{compiled} is compiled, but its copies in stages would not be: compile the stages with Pipeline.compile"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"the module is wrapped in {type(module).__name__}: pass the module inside, model.module; a Pipeline "
            "averages the gradients of its replicas itself"
        )


def _other_loss(batch: Batch, planner: Planner, module: nn.Module) -> tuple[Made | None, int]:
    trace, size = traced_otherwise(batch, planner, module)
    return None if trace is None else trace.loss, size


def traced_otherwise(batch: Batch, planner: Planner, module: nn.Module) -> tuple[Trace | None, int]:
    """The forward of a microbatch of another size, and this size. The trace is None if the forward does not accept the
    size. The size is 0 if the batch is too small for another one.
    """
    entries, size = resized(batch)
    try:
        return (planner.trace_of(module, entries, lambda _: None) if size else None), size
    except Exception:  # whatever the forward raises
        return None, size


def resized(batch: Batch) -> tuple[dict[str, Any], int]:
    """A microbatch of another size than the first, and this size, which is 0 if the batch is too small for one."""
    samples, size = sum(batch.sizes), batch.sizes[0]
    other = size + 1 if samples > size else size - 1
    if not other:
        return {}, 0
    sizes = [other, samples - other] if samples > other else [other]
    return counted(replace(batch, sizes=sizes, leaves=[]).split(batch.inputs)[0]), other


def counted(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a microbatch for a trace: all labels count."""
    return {name: all_counted(each) if name == LABELS else each for name, each in entries.items()}


def _sized(
    plan: CutPlan, planner: Planner, module: nn.Module, entries: dict[str, Any], rules: Sequence[Rule], ranks: int
) -> CutPlan:
    """The plan with the sizes that tensors have on one of several tensor ranks; for example, a bias with an entry per
    head is split like the heads. The same on every rank. If the sizes cannot be found beforehand, those of whole
    tensors are used; transfers use headers anyway.
    """
    if ranks == 1:
        return plan
    last = Unconnected(ranks - 1, ranks)  # only the first rank logs
    try:
        return plan.sized_by(planner.trace_of(module, entries, partial(shard, rules=rules, group=last)))
    except Exception:  # splitting the stages raises errors about the rules
        return plan


def _require_same(plan: CutPlan, context: Context) -> None:
    everyone: list[Any] = all_gather_object(context.world, plan.describe())
    for rank, its in enumerate(everyone):
        if its != everyone[0]:
            raise UsageError(
                f"rank {rank} was given another module, example or cuts than rank 0, so its stages would receive and "
                "own other tensors: pass the same on every rank"
            )


def _tie(module: nn.Module, plan: CutPlan, placement: Placement, rank: int) -> None:
    """Ties parameters that several stages own. On the meta device, also ties a parameter that has several names, since
    each place of a parameter leaves that device separately.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for name, parameter in module.named_parameters():
        stages = [stage for stage, each in enumerate(plan.stages) if name in each.owned]
        if len(stages) < 2 and not (parameter.is_meta and len(names[id(parameter)]) > 1):
            continue
        ranks = sorted({each for stage in stages for each in placement.ranks_of(stage)})
        shared = PipelineSharedModuleWrapper(ranks)
        if rank in ranks:
            for _ in range(2 if len(ranks) == 1 else 1):
                shared.register_parameter(parameter)
