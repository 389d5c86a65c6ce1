"""The base of the schedules of torch's API: `step` and what is below it, run by pipeflow's engine; and pipeflow's
schedules as torch's tables of actions, and such tables as schedules. Must not contain: stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.stage import PipelineStage

from pipeflow.adapters.pipelining.running import Running, own_microbatches, raise_everywhere
from pipeflow.adapters.pipelining.stage import INDICES
from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.engine.runtime.gradients.fully_sharded import fully_sharded_in
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.torch_private.pipelining import ComputationType, PipelineSchedule, TorchAction
from pipeflow.schedules import make_schedule
from pipeflow.schedules.families import FAMILIES, sizes_on

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


class OnEngine(PipelineSchedule):
    """A schedule of torch's API that pipeflow's engine runs.

    Args:
        pass_stage_and_microbatch_indices: call the modules with the keywords `stage_idx` and `mb_idx`, too, as torch
            does since 2.14.
        others: as in torch's class.

    Attributes:
        running: its steps; `running.trace` measures them, and `running.output` is the result of the last one.

    Raises ValueError as torch does.
    """

    _order = ""  # the name of pipeflow's schedule

    def __init__(self, *others: Any, pass_stage_and_microbatch_indices: bool = False, **named: Any) -> None:
        super().__init__(*others, **named)
        self.passes_indices = pass_stage_and_microbatch_indices
        if self.passes_indices and not all(isinstance(stage, PipelineStage) for stage in self.own_stages):
            raise UsageError("indices are passed to a manually constructed PipelineStage, not to a traced stage")

    @property
    def own_stages(self) -> list[Any]:
        """The stages of this rank."""
        raise NotImplementedError

    @property
    def running(self) -> Running:
        """What runs the steps, made when it is first asked for."""
        if "_running" not in vars(self):
            self._running = Running(self)
        return self._running

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline of the stages: for checkpoints, clipping and optimizers over all ranks. The ranks make it
        together when it is first needed.
        """
        return self.running.pipeline([*self._actions.values(), self.scale_grads])

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
    def has_loss(self) -> bool:
        """Whether a loss was given."""
        return self._loss_fn is not None

    def compute_loss(self, output: Any, target: Any, loss_kwargs: dict[str, Any]) -> Tensor:
        """The loss of a microbatch."""
        loss: Tensor = self._compute_loss(output, target, loss_kwargs)  # type: ignore[no-untyped-call]  # torch's
        return loss

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
        outputs = self.running.step(
            self.pipeline,
            own_microbatches(arg_mbs, kwarg_mbs, target_mbs),
            loss_kwargs,
            training=self._has_backward,
            keep=return_outputs,
        )
        for stage in self.own_stages:
            if stage.is_last:
                stage.output_chunks = outputs
                if losses is not None and self.running.output is not None:
                    losses[:] = self.running.output.losses.values()


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
