"""pipeflow: pipeline parallelism for PyTorch models that do not fit on one device. A schedule is a plain Python object:
verify it, simulate it, draw it, run it, and compare the plan with the measured step.

Schedules need no torch. Names that need torch or other slow imports are loaded on first use, so that the command starts
fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.core.action import Action, Kind, Pair
from pipeflow.core.cost import CostModel, Link
from pipeflow.core.errors import PipeflowError, PipelineError, ScheduleError, UsageError
from pipeflow.core.notebook import draw_as
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Span
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule

if TYPE_CHECKING:
    from pipeflow import huggingface as huggingface
    from pipeflow.analysis.deepspeed_order import deepspeed_schedule
    from pipeflow.analysis.graph import dependency_graph
    from pipeflow.analysis.idle_time import Cause, causes, critical_path
    from pipeflow.analysis.lowering import lower
    from pipeflow.analysis.simulation import simulate
    from pipeflow.analysis.step import step_time
    from pipeflow.analysis.trace_costs import measured_costs
    from pipeflow.checkpoint.load import Loaded, load_checkpoint
    from pipeflow.checkpoint.newest import latest_checkpoint
    from pipeflow.checkpoint.renames import Rename, Transform
    from pipeflow.checkpoint.safetensors import load_safetensors, save_safetensors
    from pipeflow.checkpoint.save import Saving, save_checkpoint
    from pipeflow.core.partition import partition_balanced, partition_uniform
    from pipeflow.optim.clip import clip_grad_norm_, grad_norm
    from pipeflow.optim.masters import MasterWeights
    from pipeflow.optim.pipelined import PipelinedOptimizer
    from pipeflow.optim.scaler import LossScaler
    from pipeflow.optim.zero import Zero
    from pipeflow.orders.batch_order import BatchOrder
    from pipeflow.orders.memory.offloading import with_offload
    from pipeflow.orders.memory.recomputation import with_recompute
    from pipeflow.orders.memory.unsharding import with_unshard
    from pipeflow.orders.optimizer_steps import with_optimizer_step
    from pipeflow.orders.search import Found
    from pipeflow.parallel.context import Context, current_context
    from pipeflow.parallel.launcher import launch
    from pipeflow.planning.catalog import MODELS, model_named
    from pipeflow.planning.cluster import Cluster
    from pipeflow.planning.device import DEVICES, Device
    from pipeflow.planning.efficiency import Efficiency
    from pipeflow.planning.estimate import plan
    from pipeflow.planning.layer_costs import LayerCosts
    from pipeflow.planning.layout import Layout, Wanted
    from pipeflow.planning.layouts import Layouts, Ranked, find_layouts
    from pipeflow.planning.presets import GPT_PRESETS
    from pipeflow.planning.rank_memory import RankPlan
    from pipeflow.planning.replanning import Candidate, Replan, replan
    from pipeflow.planning.setup import PRECISIONS, Precision, Setup
    from pipeflow.planning.step_plan import Plan, StepParts
    from pipeflow.planning.transformer import GPT
    from pipeflow.planning.vit import VIT_PRESETS, ViT
    from pipeflow.pricing.module_layouts import ModuleLayout, find_module_layouts
    from pipeflow.pricing.module_plan import ModulePlan, plan_module
    from pipeflow.runtime.divided import Divided
    from pipeflow.runtime.execution import execute_pipeline
    from pipeflow.runtime.gradients.ties import PipelineSharedModuleWrapper
    from pipeflow.runtime.microbatch import Whole
    from pipeflow.runtime.pipeline import Pipeline
    from pipeflow.runtime.step import Output
    from pipeflow.schedules.batch_order import order_for
    from pipeflow.schedules.order_search import exact, search
    from pipeflow.soundness.schedule import Violation, verify
    from pipeflow.traces.explanation import Explanation, explain
    from pipeflow.training.data.by_length import ByLength
    from pipeflow.training.data.loader import get_dataloader
    from pipeflow.training.model.build import build_stages
    from pipeflow.training.model.measure import measure_layers

__version__ = "0.1.0"

_LATER = {
    "BatchOrder": "orders.batch_order",
    "ByLength": "training.data.by_length",
    "Candidate": "planning.replanning",
    "Cause": "analysis.idle_time",
    "Cluster": "planning.cluster",
    "Context": "parallel.context",
    "DEVICES": "planning.device",
    "Device": "planning.device",
    "Divided": "runtime.divided",
    "Efficiency": "planning.efficiency",
    "Explanation": "traces.explanation",
    "Found": "orders.search",
    "GPT": "planning.transformer",
    "GPT_PRESETS": "planning.presets",
    "LayerCosts": "planning.layer_costs",
    "Layout": "planning.layout",
    "Layouts": "planning.layouts",
    "Loaded": "checkpoint.load",
    "LossScaler": "optim.scaler",
    "MODELS": "planning.catalog",
    "MasterWeights": "optim.masters",
    "ModuleLayout": "pricing.module_layouts",
    "ModulePlan": "pricing.module_plan",
    "Output": "runtime.step",
    "PRECISIONS": "planning.setup",
    "Pipeline": "runtime.pipeline",
    "PipelineSharedModuleWrapper": "runtime.gradients.ties",
    "PipelinedOptimizer": "optim.pipelined",
    "Plan": "planning.step_plan",
    "Precision": "planning.setup",
    "RankPlan": "planning.rank_memory",
    "Ranked": "planning.layouts",
    "Rename": "checkpoint.renames",
    "Replan": "planning.replanning",
    "Saving": "checkpoint.save",
    "Setup": "planning.setup",
    "StepParts": "planning.step_plan",
    "Transform": "checkpoint.renames",
    "VIT_PRESETS": "planning.vit",
    "ViT": "planning.vit",
    "Violation": "soundness.schedule",
    "Wanted": "planning.layout",
    "Whole": "runtime.microbatch",
    "Zero": "optim.zero",
    "build_stages": "training.model.build",
    "causes": "analysis.idle_time",
    "clip_grad_norm_": "optim.clip",
    "critical_path": "analysis.idle_time",
    "current_context": "parallel.context",
    "deepspeed_schedule": "analysis.deepspeed_order",
    "dependency_graph": "analysis.graph",
    "exact": "schedules.order_search",
    "execute_pipeline": "runtime.execution",
    "explain": "traces.explanation",
    "find_layouts": "planning.layouts",
    "find_module_layouts": "pricing.module_layouts",
    "get_dataloader": "training.data.loader",
    "grad_norm": "optim.clip",
    "latest_checkpoint": "checkpoint.newest",
    "launch": "parallel.launcher",
    "load_checkpoint": "checkpoint.load",
    "load_safetensors": "checkpoint.safetensors",
    "lower": "analysis.lowering",
    "measure_layers": "training.model.measure",
    "measured_costs": "analysis.trace_costs",
    "model_named": "planning.catalog",
    "order_for": "schedules.batch_order",
    "partition_balanced": "core.partition",
    "partition_uniform": "core.partition",
    "plan": "planning.estimate",
    "plan_module": "pricing.module_plan",
    "replan": "planning.replanning",
    "save_checkpoint": "checkpoint.save",
    "save_safetensors": "checkpoint.safetensors",
    "search": "schedules.order_search",
    "simulate": "analysis.simulation",
    "step_time": "analysis.step",
    "verify": "soundness.schedule",
    "with_offload": "orders.memory.offloading",
    "with_optimizer_step": "orders.optimizer_steps",
    "with_recompute": "orders.memory.recomputation",
    "with_unshard": "orders.memory.unsharding",
}

__all__ = [
    "DEVICES",
    "GPT",
    "GPT_PRESETS",
    "MODELS",
    "PRECISIONS",
    "SCHEDULES",
    "VIT_PRESETS",
    "Action",
    "BatchOrder",
    "ByLength",
    "Candidate",
    "Cause",
    "Cluster",
    "Context",
    "CostModel",
    "Device",
    "Divided",
    "Efficiency",
    "Explanation",
    "Found",
    "Kind",
    "LayerCosts",
    "Layout",
    "Layouts",
    "Link",
    "Loaded",
    "LossScaler",
    "MasterWeights",
    "ModuleLayout",
    "ModulePlan",
    "Output",
    "Pair",
    "PipeflowError",
    "Pipeline",
    "PipelineError",
    "PipelineSharedModuleWrapper",
    "PipelinedOptimizer",
    "Placement",
    "Plan",
    "Precision",
    "RankPlan",
    "Ranked",
    "Rename",
    "Replan",
    "Saving",
    "Schedule",
    "ScheduleError",
    "Setup",
    "Span",
    "StepParts",
    "Timeline",
    "Transform",
    "UsageError",
    "ViT",
    "Violation",
    "Wanted",
    "Whole",
    "Zero",
    "build_stages",
    "causes",
    "clip_grad_norm_",
    "critical_path",
    "current_context",
    "deepspeed_schedule",
    "dependency_graph",
    "exact",
    "execute_pipeline",
    "explain",
    "find_layouts",
    "find_module_layouts",
    "get_dataloader",
    "grad_norm",
    "latest_checkpoint",
    "launch",
    "load_checkpoint",
    "load_safetensors",
    "lower",
    "make_schedule",
    "measure_layers",
    "measured_costs",
    "model_named",
    "order_for",
    "partition_balanced",
    "partition_uniform",
    "plan",
    "plan_module",
    "replan",
    "save_checkpoint",
    "save_safetensors",
    "search",
    "simulate",
    "step_time",
    "verify",
    "with_offload",
    "with_optimizer_step",
    "with_recompute",
    "with_unshard",
]


@draw_as(Timeline)
def _drawn(timeline: Timeline) -> str:
    from pipeflow.draw import svg

    return svg(timeline)


@draw_as(Schedule)
def _drawn_as_planned(schedule: Schedule) -> str | None:
    """An SVG of the simulated schedule. None if it cannot run: a notebook then shows its text."""
    from pipeflow.analysis.simulation import simulate

    try:
        return _drawn(simulate(schedule))
    except ScheduleError:
        return None


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "huggingface":
        return import_module("pipeflow.huggingface")
    if name not in _LATER:
        raise AttributeError(f"module 'pipeflow' has no attribute {name!r}")
    return getattr(import_module(f"pipeflow.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
