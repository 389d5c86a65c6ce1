"""The base of the schedules of torch's API: `step` and what is below it, run by pipeflow's engine. Must not contain:
orders of schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.pipelining.schedules as theirs
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.stage import PipelineStage

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.pipelining import orders
from pipeflow.pipelining.running import Running, own_microbatches, raise_everywhere
from pipeflow.pipelining.stage import INDICES
from pipeflow.runtime.gradients.fully_sharded import fully_sharded_in
from pipeflow.runtime.pipeline import Pipeline


class OnEngine(theirs._PipelineSchedule):
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
        return orders.schedule_of(self._actions, ranks, self._n_microbatches, name, unshards=unshards)

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
