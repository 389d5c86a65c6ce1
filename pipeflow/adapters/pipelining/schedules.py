"""Schedules: the classes of torch.distributed.pipelining, whose steps pipeflow's engine runs in pipeflow's orders.

Constructors and files of orders are torch's; a class says where its order comes from.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch.distributed.pipelining.schedules as theirs
from torch import Tensor

from pipeflow.adapters.pipelining.base import OnEngine, order_of
from pipeflow.core.errors import UsageError, unknown
from pipeflow.engine.torch_private.pipelining import PipelineScheduleRuntime, ScheduleForwardOnly
from pipeflow.schedules.families import FAMILIES
from pipeflow.schedules.registry import OTHER_NAMES


class PipelineScheduleSingle(OnEngine, theirs.PipelineScheduleSingle):
    """The base of schedules with one stage per rank."""

    @property
    def own_stages(self) -> list[Any]:
        return [self._stage]

    def _get_pipeline_order(self) -> dict[int, list[Any]] | None:
        if not self._order:
            return None
        return dict(order_of(self._order, self._num_stages, self._num_stages, self._n_microbatches))


class PipelineScheduleMulti(OnEngine, theirs.PipelineScheduleMulti):
    """The base of schedules with several stages per rank."""

    @property
    def own_stages(self) -> list[Any]:
        return self._stages

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        ranks = self.pp_group_size
        return list(order_of(self._order, ranks, ranks * len(self._stages), self._n_microbatches)[rank])


class _ScheduleForwardOnly(PipelineScheduleSingle, ScheduleForwardOnly):
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


_WHOLE = "pass the whole batch, as args, kwargs and target"
_NEWER = {
    **dict.fromkeys(("arg_mbs", "kwarg_mbs", "target_mbs"), ("2.14", _WHOLE)),
    "finalize_gradients": ("2.15", "leave it out"),
}
"""Arguments of `step`: the torch whose own runtime takes each, and what to do before."""


class _PipelineScheduleRuntime(PipelineScheduleMulti, PipelineScheduleRuntime):
    """Any order, such as one of a file. If functions are registered for actions, torch's own runtime runs it, because
    they call parts of that runtime.
    """

    @property
    def takes_mean(self) -> bool:
        """As in torch, gradients are scaled by REDUCE_GRAD, which a table with transfers may lack."""
        kinds = {action.computation_type for row in self._actions.values() for action in row if action is not None}
        return self.scale_grads and theirs.REDUCE_GRAD in kinds

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step, as the other schedules do. Raises UsageError if functions are registered, and torch's runtime
        lacks one of the arguments.
        """
        if self._comp_type_to_function_map:
            known = signature(theirs.PipelineScheduleMulti.step).parameters.keys()
            for name, (torch, way) in _NEWER.items():
                if name in kwargs and name not in known:
                    raise UsageError(
                        "functions are registered for actions, so torch's runtime makes this step, and before torch "
                        f"{torch} it takes no {name}: {way}"
                    )
            return theirs.PipelineScheduleMulti.step(self, *args, **kwargs)
        return super().step(*args, **kwargs)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        if self._comp_type_to_function_map:
            PipelineScheduleRuntime._step_microbatches(self, *args, **kwargs)
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
    raise unknown("schedule", schedule_name, [*_CLASSES, *FAMILIES], OTHER_NAMES)


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
        super().__init__(*args, **kwargs)
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        self._prepare_schedule_with_comms(self.pipeline_order)


def __getattr__(name: str) -> Any:
    """Other names of torch's module: actions, passes over tables of actions, and what checks them."""
    return getattr(theirs, name)
