"""Running: the Pipeline of a schedule's stages, in the context of their process group, and its steps on microbatches
that each rank has for itself. Must not contain: the order of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeflow.adapters.batches import alike
from pipeflow.adapters.pipelining.pipe import TracedCall, tie
from pipeflow.adapters.pipelining.stage import BuilderCall, Own, StageCall
from pipeflow.core.errors import PipelineError, UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context, context_if_launched, keep, kept
from pipeflow.engine.parallel.launcher import launch
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.microbatch import Divided
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.runtime.step import Output
from pipeflow.engine.torch_private.trees import tree_leaves

_MADE = "pipelining.group"


def context_of(group: dist.ProcessGroup | None, device: torch.device) -> Context:
    """The context whose pipeline is the ranks of `group`, which call it together; None is torch's default group.

    A context of `pipeflow.launch` is used if it has this pipeline; otherwise one is launched for the group alone.
    Raises UsageError for a context of another pipeline or device.
    """
    if dist.is_initialized() and dist.get_backend(group) == "fake" and dist.get_world_size(group) > 1:
        raise UsageError("ranks of a fake process group cannot exchange tensors: start one process per rank")
    ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
    context = context_if_launched()
    if context is not None and kept(_MADE) not in (None, _identity(group)):  # torch's groups were made again since
        context.close()
        context = None
    if context is None:
        context = launch(device=device, group=group)
        keep(_MADE, _identity(group))
        return context
    held = tuple(context.transport.world_rank(rank) for rank in range(context.pipeline_size))
    if kept(_MADE) is None and held != ranks:
        raise UsageError(
            f"the stages are on the ranks {list(ranks)} of their process group, but pipeflow.launch made a pipeline of "
            f"the ranks {list(held)}: pass launch(pipeline={len(ranks)}), or leave launch out"
        )
    if context.device != _whole(device, context.device):
        raise UsageError(f"the stages are on {device}, but this process computes on {context.device}: use one device")
    return context


def _identity(group: dist.ProcessGroup | None) -> object:
    """What tells one process group from another, also if torch.distributed was initialized again."""
    return (group if group is not None else dist.group.WORLD) if dist.is_initialized() else 0


def _whole(device: torch.device, own: torch.device) -> torch.device:
    """The device with its index, which is that of this process if it has none."""
    return own if torch.device(device).type == own.type and torch.device(device).index is None else torch.device(device)


class StepRequest(Protocol):
    """What the engine asks of a schedule of torch's API: its stages on this rank, its order, and its loss."""

    passes_indices: bool

    @property
    def own_stages(self) -> Sequence[Any]: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def takes_mean(self) -> bool: ...

    @property
    def has_loss(self) -> bool: ...

    def compute_loss(self, output: Any, target: Any, loss_kwargs: dict[str, Any]) -> Tensor: ...


class Running:
    """The Pipeline that runs a schedule of torch's API, made anew when its stages' modules or its order were replaced.

    Args:
        steps: the schedule.

    Attributes:
        trace: whether steps are measured; the same on every rank.
        output: the result of the last step.
    """

    def __init__(self, steps: StepRequest) -> None:
        self._steps = ref(steps)
        self.trace = False
        self.output: Output | None = None
        self._loss_kwargs: dict[str, Any] = {}
        self._scale = 1.0  # of gradients: a sum over microbatches is a multiple of their mean
        self._made_of: list[object] = []
        self._pipeline: Pipeline | None = None

    @property
    def steps(self) -> StepRequest:
        """The schedule that these steps are of."""
        steps = self._steps()
        assert steps is not None
        return steps

    def pipeline(self, made_of: Sequence[object]) -> Pipeline:
        """The Pipeline. All ranks make it together when it is first needed, and again for another `made_of`."""
        parts = [*made_of, *(stage.submod for stage in self.steps.own_stages)]
        is_same = len(parts) == len(self._made_of) and all(a is b for a, b in zip(parts, self._made_of, strict=True))
        if self._pipeline is None or not is_same:
            self._pipeline, self._made_of = self._make(), parts
        return self._pipeline

    def _make(self) -> Pipeline:
        steps = self.steps
        self._scale = 1.0 if steps.takes_mean else float(steps.schedule.num_microbatches)
        stages = sorted(steps.own_stages, key=lambda stage: stage.stage_index)
        context = context_of(stages[0].group, torch.device(stages[0].device))
        with context.alarm.raised_everywhere():
            schedule = _as_all_can(steps.schedule, context)
            tie(stages, stages[0].stage_index_to_group_rank)
            calls = [call_of(stage) for stage in stages]
            for call in calls:
                call.passes_indices = steps.passes_indices
            return Pipeline(
                nn.ModuleList(calls),
                schedule,
                routes=calls[0].wiring.routes if isinstance(calls[0], TracedCall) else None,
                criterion=self._loss if steps.has_loss else None,
                weigh=alike,
                stages=[stage.stage_index for stage in stages],
            )

    def _loss(self, output: object, target: object) -> Tensor:
        return self.steps.compute_loss(output, target, self._loss_kwargs)

    def step(
        self,
        pipeline: Pipeline,
        microbatches: Divided,
        loss_kwargs: dict[str, Any] | None,
        *,
        training: bool,
        keep: bool,
    ) -> list[object]:
        """Runs one step, and returns the outputs of the last stage per microbatch if it is here and they are kept."""
        calls = [call for call in pipeline.chunks if isinstance(call, StageCall)]
        last = next((call for call in calls if call.is_last), None) if keep else None
        outputs: dict[int, object] = {}
        self._loss_kwargs = loss_kwargs or {}
        if last is not None:
            last.outputs = outputs
        try:
            self.output = execute_pipeline(
                iter([microbatches]),
                pipeline,
                forward_only=not training,
                trace=self.trace,
                gradient_scale=self._scale,
            )
        finally:
            self._loss_kwargs = {}
            if last is not None:
                last.outputs = None
        return [outputs[microbatch] for microbatch in sorted(outputs)]


def _as_all_can(schedule: Schedule, context: Context) -> Schedule:
    """The schedule, without unshards if a rank has stages that are not under fully_shard. All ranks call it."""
    plain = schedule.without_unshards()
    able = [bool(told) for [told] in all_gather(context.transport, [float(plain.rows != schedule.rows)])]
    return schedule if all(able) else plain


def call_of(stage: Any) -> StageCall:
    """The module that the engine calls for a stage. Raises UsageError if the stage holds no module."""
    if not isinstance(stage.submod, nn.Module):
        kind = type(stage.submod).__name__
        raise UsageError(f"stage {stage.stage_index} holds {kind}, not a module: pass PipelineStage an nn.Module")
    if hasattr(stage, "pipe_info"):
        return TracedCall(stage)
    return StageCall(stage) if stage.dw_builder is None else BuilderCall(stage)


def own_microbatches(args: Sequence[Any], kwargs: Sequence[Any], targets: Sequence[Any] | None) -> Divided:
    """The microbatches of this rank: arguments of its first stage, keywords of each of its stages, targets of its last
    one. The engine looks for leaves of a graph in them if any wants a gradient.
    """
    entries = chain(*args, *(each.values() for each in kwargs))
    kind = tuple if any(map(_wants_gradient, entries)) else Own
    own = [{"own": kind(each)} for each in zip(args, kwargs, range(len(args)), strict=True)]
    return Divided(list(zip(own, [None] * len(args) if targets is None else targets, strict=True)), own=True)


def _wants_gradient(entry: object) -> bool:
    leaves = (entry,) if isinstance(entry, Tensor) else tree_leaves(entry)
    return any(isinstance(each, Tensor) and each.requires_grad for each in leaves)


def raise_everywhere(context: Context, error: Exception) -> None:
    """Tells the other ranks, which have begun a step, that this one cannot: they raise an error that names it."""
    with suppress(PipelineError, UsageError), context.alarm.raised_everywhere():
        raise error
