"""The base of the schedules of torch's API: `step` and what is below it, run by pipeflow's engine in the context of the
stages' process group; and pipeflow's schedules as torch's tables of actions, and such tables as schedules. Must not
contain: stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.stage import PipelineStage

from pipeflow.adapters.batches import alike
from pipeflow.adapters.pipelining.pipe import TracedCall, tie
from pipeflow.adapters.pipelining.stage import INDICES, BuilderCall, StageCall, own_microbatches
from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.errors import PipelineError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule, require_unsliced
from pipeflow.engine.parallel.context import Context, context_if_launched, keep, kept
from pipeflow.engine.parallel.launcher import launch
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.gradients.fully_sharded import fully_sharded_in
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.runtime.step import Output
from pipeflow.engine.torch_private.pipelining import ComputationType, PipelineSchedule, TorchAction
from pipeflow.schedules import make_schedule
from pipeflow.schedules.families import FAMILIES, sizes_on

_MADE = "pipelining.group"
Actions = Mapping[int, Sequence[Any]]
"""Per rank, actions of torch, and None where it waits."""

_KINDS = {
    Kind.F: ComputationType.FORWARD,
    Kind.B: ComputationType.FULL_BACKWARD,
    Kind.I: ComputationType.BACKWARD_INPUT,
    Kind.W: ComputationType.BACKWARD_WEIGHT,
}
_COMPUTATIONS = {*_KINDS.values(), ComputationType.OVERLAP_F_B}
_UNSHARDS = {ComputationType.UNSHARD, ComputationType.RESHARD}


@lru_cache(maxsize=64)
def order_of(name: str, ranks: int, stages: int, microbatches: int) -> dict[int, list[Any]]:
    """The actions of each rank under a schedule of pipeflow with this number of stages in all. Raises UsageError if it
    has no such size, and for one whose stages have copies on two ranks.
    """
    for options in sizes_on(FAMILIES[name], Placement.looped(ranks, max(stages // ranks, 1))):
        try:
            [path] = make_schedule(name, ranks=ranks, microbatches=1, **options).placement.paths
        except ValueError:  # it has no such size, or two paths
            continue
        if len(path) == stages:
            schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, **options)
            require_unsliced(schedule, "torch.distributed.pipelining")
            return {rank: [_action(entry) for entry in row] for rank, row in enumerate(schedule.rows)}
    raise UsageError(f"schedule {name!r} does not run {stages} stages on {ranks} ranks, each stage on one of them")


def _action(entry: Entry) -> Any:
    """An entry of a schedule as torch's action."""
    if isinstance(entry, Action):
        return TorchAction(entry.stage, _KINDS[entry.kind], entry.microbatch)
    return TorchAction(-1, ComputationType.OVERLAP_F_B, None, tuple(map(_action, actions_of(entry))))


def schedule_of(
    actions: Actions, stage_to_rank: Mapping[int, int], microbatches: int, name: str, *, unshards: bool = False
) -> Schedule:
    """The schedule of a table of actions. Idle time, transfers and reductions are left out, because pipeflow derives
    them; unshards and reshards stay only with `unshards`, for stages under fully_shard. Raises UsageError for a table
    without actions, and ScheduleError for one that cannot be read.
    """
    if not actions:
        raise UsageError(f"{name} has no order yet: set pipeline_order, or load one with _load_csv")
    kinds = _COMPUTATIONS | (_UNSHARDS if unshards else set())
    kept = [
        [str(action) for action in actions[rank] if action is not None and action.computation_type in kinds]
        for rank in sorted(actions)
    ]
    placement = Placement((tuple(stage_to_rank[stage] for stage in sorted(stage_to_rank)),))
    return Schedule.from_csv("\n".join(map(",".join, kept)), placement, microbatches, name=name)


@dataclass
class Running:
    """How the steps of a schedule run.

    Attributes:
        trace: whether they are measured; the same on every rank.
        output: the result of the last one.
    """

    trace: bool = False
    output: Output | None = None


class OnEngine(PipelineSchedule):
    """A schedule of torch's API that pipeflow's engine runs.

    Args:
        pass_stage_and_microbatch_indices: call the modules with the keywords `stage_idx` and `mb_idx`, too, as torch
            does since 2.14.
        others: as in torch's class.

    Attributes:
        running: how its steps run; `running.trace` measures them, and `running.output` is the result of the last one.

    Raises ValueError as torch does.
    """

    _order = ""  # the name of pipeflow's schedule
    _pipeline: Pipeline
    _scale: float  # of gradients: a sum over microbatches is a multiple of their mean

    def __init__(self, *others: Any, pass_stage_and_microbatch_indices: bool = False, **named: Any) -> None:
        super().__init__(*others, **named)
        self.running = Running()
        self._loss_kwargs: dict[str, Any] = {}
        self._made_of: list[object] = []
        self.passes_indices = pass_stage_and_microbatch_indices
        if self.passes_indices and not all(isinstance(stage, PipelineStage) for stage in self.own_stages):
            raise UsageError("indices are passed to a manually constructed PipelineStage, not to a traced stage")

    @property
    def own_stages(self) -> list[Any]:
        """The stages of this rank."""
        raise NotImplementedError

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline of the stages: for checkpoints, clipping and optimizers over all ranks. The ranks make it
        together when it is first needed, and again when the order or the module of a stage was replaced.
        """
        parts = [*self._actions.values(), self.scale_grads, *(stage.submod for stage in self.own_stages)]
        is_same = len(parts) == len(self._made_of) and all(a is b for a, b in zip(parts, self._made_of, strict=True))
        if not is_same:
            self._pipeline, self._made_of = self._make(), parts
        return self._pipeline

    def _make(self) -> Pipeline:
        self._scale = 1.0 if self.takes_mean else float(self._n_microbatches)
        stages = sorted(self.own_stages, key=lambda stage: stage.stage_index)
        context = context_of(stages[0].group, torch.device(stages[0].device))
        loss = WeakMethod(self._loss)  # so that a schedule without users is freed, which has this Pipeline
        with context.alarm.raised_everywhere():
            schedule = _as_all_can(self.schedule, context)
            tie(stages, stages[0].stage_index_to_group_rank)
            calls = [call_of(stage) for stage in stages]
            for call in calls:
                call.passes_indices = self.passes_indices
            return Pipeline(
                nn.ModuleList(calls),
                schedule,
                routes=calls[0].wiring.routes if isinstance(calls[0], TracedCall) else None,
                criterion=None if self._loss_fn is None else lambda *given: loss()(*given),  # type: ignore[misc]  # it lives: it calls
                weigh=alike,
                stages=[stage.stage_index for stage in stages],
            )

    def _loss(self, output: object, target: object) -> Tensor:
        loss: Tensor = self._compute_loss(output, target, self._loss_kwargs)  # type: ignore[no-untyped-call]  # torch's
        return loss

    @property
    def schedule(self) -> Schedule:
        """The schedule as a value, which can be verified, simulated, drawn and compared. It has the unshards of its
        table if all stages of this rank are under fully_shard.
        """
        ranks = self.own_stages[0].stage_index_to_group_rank
        name = self._order or type(self).__name__
        unshards = all(isinstance(each.submod, nn.Module) and fully_sharded_in(each.submod) for each in self.own_stages)
        return schedule_of(self._actions, ranks, self._n_microbatches, name, unshards=unshards)

    @property
    def takes_mean(self) -> bool:
        """Whether gradients are those of the mean of the microbatches' losses, not of their sum."""
        return self.scale_grads

    @property
    def _actions(self) -> dict[int, list[Any]]:
        """The order that runs."""
        lowered: dict[int, list[Any]] | None = getattr(self, "pipeline_order_with_comms", None)
        return lowered or getattr(self, "pipeline_order", None) or {}

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Runs one step: splits this rank's batch, runs the schedule, and adds gradients to `.grad`.

        Every rank calls it; only the rank with the first stage needs `args`, and only the one with the last stage
        `target`. Each stage gets the `kwargs` of its own rank.

        Args:
            args, kwargs: arguments of the model, split as the schedule's chunk specs say.
            target: second argument of the loss: a tensor, or a tree of tensors.
            losses: list that receives the loss of each microbatch on the rank with the last stage.
            return_outputs: return the merged outputs on the rank with the last stage.
            loss_kwargs: keywords of the loss.
            arg_mbs, kwarg_mbs, target_mbs: microbatches that are split already, instead of args, kwargs and target.
            finalize_gradients: False says that `.grad` is read after a later step only, as under `fully_shard` in torch
                2.15. Here each step leaves whole gradients in `.grad`, so it changes nothing.

        Raises what is wrong with this rank's arguments as torch does, and then a PipelineError that names this rank on
        all others.
        """
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError("step() requires gradients to be enabled: call eval() where they are not")
        pipeline = self.pipeline
        try:
            if arg_mbs is kwarg_mbs is target_mbs is None:
                arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
                target_mbs = self._split_target(target)
            else:
                _require_split(args, kwargs, target)
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            if self.passes_indices:
                _require_free(kwarg_mbs)
            if self._has_backward and target_mbs is None and any(stage.is_last for stage in self.own_stages):
                raise UsageError(
                    "step() needs target= on the rank with the last stage, because the schedule has a loss_fn"
                )
        except Exception as error:
            raise_everywhere(pipeline.context, error)
            raise
        for stage in self.own_stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)
        last = next((stage for stage in self.own_stages if stage.is_last), None)
        return self._merge_outputs(last.output_chunks) if last is not None and return_outputs else None

    def _check_inputs(self, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        """This rank's microbatches of arguments and keywords, as many as the schedule has."""
        arg_mbs, kwarg_mbs = super()._check_inputs(*args, **kwargs)
        if not all(isinstance(each, tuple) for each in arg_mbs):
            raise TypeError("arg_mbs must be a list of tuples, one per microbatch, with the arguments of the model")
        if not all(isinstance(each, dict) for each in kwarg_mbs):
            raise TypeError("kwarg_mbs must be a list of dicts, one per microbatch, with the keywords of the model")
        return arg_mbs, kwarg_mbs

    def _split_target(self, target: Any) -> list[Any] | None:
        if target is None:
            return None
        if isinstance(target, Tensor) and target.dim() and len(target) >= self._n_microbatches:
            return list(target.tensor_split(self._n_microbatches))
        return [part for (part,) in split_args_kwargs_into_chunks((target,), None, self._n_microbatches)[0]]

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Runs the microbatches, and leaves the last stage's outputs in it."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        pipeline, microbatches = self.pipeline, own_microbatches(arg_mbs, kwarg_mbs, target_mbs)
        last = next((call for call in pipeline.chunks if isinstance(call, StageCall) and call.is_last), None)
        outputs: dict[int, object] = {}
        self._loss_kwargs = loss_kwargs or {}
        if last is not None and return_outputs:
            last.outputs = outputs
        try:
            told = self.running.output = execute_pipeline(
                iter([microbatches]),
                pipeline,
                forward_only=not self._has_backward,
                trace=self.running.trace,
                gradient_scale=self._scale,
            )
        finally:
            self._loss_kwargs = {}
            if last is not None:
                last.outputs = None
        for stage in self.own_stages:
            if stage.is_last:
                stage.output_chunks = [outputs[microbatch] for microbatch in sorted(outputs)]
                if losses is not None:
                    losses[:] = told.losses.values()


def _require_split(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> None:
    """Raises UsageError for parts of a batch beside microbatches that are split already."""
    if args:
        raise UsageError("microbatches are split already: pass pre-split positional inputs through arg_mbs")
    if kwargs:
        raise UsageError(f"Unexpected keyword arguments with pre-split inputs: {', '.join(kwargs)}; use kwarg_mbs")
    if target is not None:
        raise UsageError("microbatches are split already: pass pre-split targets through target_mbs")


def _require_free(kwargs: Iterable[Mapping[str, Any]]) -> None:
    """Raises UsageError for keywords that have the names of the indices."""
    for name in INDICES:
        if any(name in each for each in kwargs):
            raise UsageError(f"the schedule reserves the keyword {name}, which it passes to its stages: rename yours")


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


def raise_everywhere(context: Context, error: Exception) -> None:
    """Tells the other ranks, which have begun a step, that this one cannot: they raise an error that names it."""
    with suppress(PipelineError, UsageError), context.alarm.raised_everywhere():
        raise error
