"""Schedules: the classes of torch.distributed.pipelining, whose steps pipeflow's engine runs in pipeflow's orders.

Constructors, splitting and merging, and files of orders are torch's. A class differs from torch's in `step` and below,
and in where its order comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed.pipelining.schedules as theirs
from torch import Tensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.schedule import Schedule
from pipeflow.pipelining import orders
from pipeflow.pipelining.running import Running, own_microbatches, raise_everywhere
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.schedules.families import FAMILIES


class OnEngine(theirs._PipelineSchedule):
    """A schedule of torch's API that pipeflow's engine runs; the base of all classes here.

    Attributes:
        running: its steps; `running.trace` measures them, and `running.output` is the result of the last one.
    """

    _order = ""  # the name of pipeflow's schedule

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
        """The schedule as a value, which can be verified, simulated, drawn and compared."""
        ranks = self.own_stages[0].stage_index_to_group_rank
        name = self._order or type(self).__name__
        return orders.schedule_of(self._actions, ranks, self._n_microbatches, name)

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


class PipelineScheduleSingle(OnEngine, theirs.PipelineScheduleSingle):
    """The base of schedules with one stage per rank."""

    @property
    def own_stages(self) -> list[Any]:
        return [self._stage]

    def _get_pipeline_order(self) -> dict[int, list[Any]] | None:
        if not self._order:
            return None
        return dict(orders.order_of(self._order, self._num_stages, self._num_stages, self._n_microbatches))


class PipelineScheduleMulti(OnEngine, theirs.PipelineScheduleMulti):
    """The base of schedules with several stages per rank."""

    @property
    def own_stages(self) -> list[Any]:
        return self._stages

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        ranks = self.pp_group_size
        return list(orders.order_of(self._order, ranks, ranks * len(self._stages), self._n_microbatches)[rank])


class _ScheduleForwardOnly(PipelineScheduleSingle, theirs._ScheduleForwardOnly):
    """Forwards alone, without a loss."""

    _order = "gpipe"

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if target_mbs is not None or losses is not None:
            raise RuntimeError("a forward-only schedule computes no loss: leave target and losses out")
        super()._step_microbatches(arg_mbs, kwarg_mbs, None, None, return_outputs, loss_kwargs)


class ScheduleGPipe(PipelineScheduleSingle, theirs.ScheduleGPipe):
    """GPipe, in the order of pipeflow's "gpipe"."""

    _order = "gpipe"


class Schedule1F1B(PipelineScheduleSingle, theirs.Schedule1F1B):
    """1F1B, in the order of pipeflow's "1f1b"."""

    _order = "1f1b"


class _PipelineScheduleRuntime(PipelineScheduleMulti, theirs._PipelineScheduleRuntime):
    """Any order, such as one of a file. If functions are registered for actions, torch's own runtime runs it, because
    they call parts of that runtime.
    """

    @property
    def takes_mean(self) -> bool:
        """As in torch, gradients are scaled by REDUCE_GRAD, which a table with transfers may lack."""
        kinds = {action.computation_type for row in self._actions.values() for action in row if action is not None}
        return self.scale_grads and theirs.REDUCE_GRAD in kinds

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step, as the other schedules do."""
        if self._comp_type_to_function_map:
            return theirs.PipelineScheduleMulti.step(self, *args, **kwargs)
        return super().step(*args, **kwargs)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        if self._comp_type_to_function_map:
            theirs._PipelineScheduleRuntime._step_microbatches(self, *args, **kwargs)
        else:
            super()._step_microbatches(*args, **kwargs)


class ScheduleLoopedBFS(_PipelineScheduleRuntime, theirs.ScheduleLoopedBFS):
    """Breadth-first: pipeflow's "looped-bfs", whose backwards begin with microbatch 0, as in the paper."""

    _order = "looped-bfs"


class ScheduleInterleaved1F1B(_PipelineScheduleRuntime, theirs.ScheduleInterleaved1F1B):
    """Interleaved 1F1B, in the order of pipeflow's "interleaved-1f1b"."""

    _order = "interleaved-1f1b"


class ScheduleInterleavedZeroBubble(_PipelineScheduleRuntime, theirs.ScheduleInterleavedZeroBubble):
    """Interleaved zero bubble, in the order of pipeflow's "interleaved-zb"."""

    _order = "interleaved-zb"


class ScheduleZBVZeroBubble(_PipelineScheduleRuntime, theirs.ScheduleZBVZeroBubble):
    """ZB-V, in the order of pipeflow's "zb-v"."""

    _order = "zb-v"


class ScheduleDualPipeV(_PipelineScheduleRuntime, theirs.ScheduleDualPipeV):
    """DualPipeV, in the order of pipeflow's "dualpipe-v"."""

    _order = "dualpipe-v"


_CLASSES: dict[str, type[Any]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[Any]:
    """The class of a schedule, by torch's name or pipeflow's, in upper or lower case and with or without hyphens.

    Raises UsageError, a ValueError, for an unknown name; the message suggests the nearest one.
    """
    plain = _plain(schedule_name)
    for name, found in _CLASSES.items():
        if _plain(name) == plain:
            return found
    for name in FAMILIES:
        if _plain(name) == plain:
            return _class_of(name)
    raise unknown("schedule", schedule_name, [*_CLASSES, *FAMILIES])


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


@cache
def _class_of(name: str) -> type[Any]:
    """The class of one of pipeflow's schedules that torch does not have."""
    usual = next((found for found in _CLASSES.values() if found._order == name), None)
    if usual is not None:
        return usual
    one = len(FAMILIES[name](2, 2).placement.paths[0]) == 2
    return type(f"Schedule_{_plain(name)}", (PipelineScheduleSingle if one else _OfFamily,), {"_order": name})


class _OfFamily(_PipelineScheduleRuntime):
    """A schedule of pipeflow with several stages per rank that torch does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        self._prepare_schedule_with_comms(self.pipeline_order)


def __getattr__(name: str) -> Any:
    """Other names of torch's module: actions, passes over tables of actions, and what checks them."""
    return getattr(theirs, name)
