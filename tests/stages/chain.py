"""A module's stages one after the other, without ranks: each is given what earlier ones made for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.stages.stage import ModuleStage


def chained(module: nn.Module, batch: Mapping[str, Any], stages: int, **options: Any) -> tuple[Any, CutPlan]:
    """What the last stage returns for a batch, and the plan; `options` are those of a Planner."""
    planner = Planner(module, stages, **options)
    plan = planner.plan(batch)
    parts = [ModuleStage(module, index, planner, plan, torch.device("cpu")) for index in range(stages)]
    sent: dict[tuple[int, int], list[Any]] = {}
    output: Any = None
    for index, (part, ways) in enumerate(zip(parts, plan.ways, strict=True)):
        output = part(*(sent[source, index] for source in ways.takes), **batch)
        leaves = iter(tree_leaves(output))
        for target, values in ways.gives.items():
            sent[index, target] = [next(leaves) for _ in values]
    return output, plan
