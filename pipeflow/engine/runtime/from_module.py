"""Makes a rank's part of a Pipeline from a whole module: its stages, split over tensor and expert ranks, and ties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.engine.deferral.compile_backend import is_compiled
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.engine.parallel.transport.protocol import Unconnected
from pipeflow.engine.runtime.arguments import require_ranks
from pipeflow.engine.runtime.context_ranks import ContextTokens
from pipeflow.engine.runtime.gradients.weights import PipelineSharedModuleWrapper
from pipeflow.engine.runtime.microbatch import Divided, as_batch
from pipeflow.engine.runtime.sharing import CONTEXT
from pipeflow.engine.stages.blocks import Blocks, Cuts
from pipeflow.engine.stages.criterion import own_loss
from pipeflow.engine.stages.module_state import counts_of
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.tensor.experts import divide_experts, experts_in
from pipeflow.engine.tensor.layer import TensorLayer
from pipeflow.engine.tensor.module_sharding import shard
from pipeflow.engine.tensor.random import share_default_state
from pipeflow.engine.tensor.rules import Rule


def priced(cost: CostModel | None, plan: CutPlan) -> CostModel | None:
    """The cost model, with the bytes that pass between the stages added if it has none."""
    if cost is None or cost.activation_bytes:
        return cost
    near = [float(plan.bytes_between(stage, stage + 1)) for stage in range(len(plan.stages) - 1)]
    far: dict[tuple[int, int], float] = {route: float(plan.bytes_between(*route)) for route in plan.routes}
    return replace(cost, activation_bytes=(*near, 0.0), route_bytes=far)


def stages_from(
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
) -> tuple[nn.ModuleList, CutPlan, Planner]:
    """The stages of this rank, with the plan of the example batch and their planner; all ranks make theirs together.
    Arguments are those of `Pipeline.from_module`.

    Raises UsageError for a module that cannot be cut, for an example batch that cannot be split, and if the ranks were
    given different modules, examples or cuts.
    """
    _require_plain(module)
    require_ranks(schedule, context)
    if max(context.context_size, schedule.placement.num_stages) > 1:
        _require_whole_layers(module)
    if context.context_size > 1:
        CONTEXT.require_stages([module])
    if context.experts.size > 1 and not [*experts_in(module, context.experts.size)]:
        raise UsageError(
            f"{type(module).__name__} has no layer of experts with the parameters and the forward that transformers "
            "gives them, so expert ranks cannot divide it: launch with experts=1"
        )
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
    if context.context_size > 1:
        batch = ContextTokens(context, None if has_criterion else own_loss, {}).own(batch, module)
    entries = batch.split(batch.inputs)[0]
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        plan = planner.plan(entries)
        sized = _sized(plan, planner, module, entries, rules, context.tensor_size)
    _require_same(plan, context)
    own = placement.stages_of(context.pipeline_rank)
    stages = [ModuleStage(module, stage, planner, plan, device) for stage in own]
    before = [counts_of(stage.root).items() for stage in stages]
    shard(*(stage.root for stage in stages), rules=rules, group=context.tensor)
    divide_experts(*(stage.root for stage in stages), group=context.experts)
    for stage, its in zip(stages, before, strict=True):
        planner.split |= {key for key, _ in counts_of(stage.root).items() - its}
    share_default_state(context.tensor, device)
    _tie(module, plan, placement, context.pipeline_rank)
    return nn.ModuleList(stages), sized, planner


def _require_plain(module: object) -> None:
    if not isinstance(module, nn.Module):
        hint = f": make the module that {module!r} names first" if isinstance(module, str) else ""
        hint = ": pass nn.Sequential(*layers)" if isinstance(module, list | tuple) else hint
        raise UsageError(f"from_module takes an nn.Module, got {type(module).__name__}{hint}")
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


def _require_whole_layers(module: nn.Module) -> None:
    """Raises UsageError for layers that are split already: stages split those of the module that they are made from."""
    for name, layer in module.named_modules():
        if isinstance(layer, TensorLayer) and layer.splits():
            raise UsageError(
                f"{name or 'the module'} is a {type(layer).__name__} of pipeflow.tensor, and from_module makes no "
                "stages of such layers, nor divides their tokens over context ranks: make a Pipeline of "
                "build_gpt_pipeline(...) or of stages of your own, or pass a module with torch's layers"
            )


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
