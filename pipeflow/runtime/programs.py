"""Programs: what the steps of a pipeline run on this rank, compiled when a schedule first comes in such a step. What
must not live here: batches and losses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from pipeflow.analysis.lower import lower
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes
from pipeflow.core.schedule import Schedule
from pipeflow.parallel.context import Context
from pipeflow.runtime.devices import require_placed
from pipeflow.runtime.gradients.orders import Orders, orders_of
from pipeflow.runtime.gradients.step_end import Gradients
from pipeflow.runtime.program.compile import Compiled, compile_program
from pipeflow.runtime.program.pairs import Overlap
from pipeflow.runtime.program.payload import Promise
from pipeflow.runtime.stage import Stage
from pipeflow.soundness.schedule import verify

KEPT = 16  # compiled programs of one pipeline, those that were used last


class Mode(NamedTuple):
    """How a schedule is run: with how many of its microbatches, with backwards or without, averaged or not."""

    microbatches: int
    training: bool
    reduce: bool


class Runnable(NamedTuple):
    """A schedule as this rank runs it, the number that stands for it where ranks compare theirs, and the order in which
    the ranks reduce their stages.
    """

    schedule: Schedule
    mode: Mode
    digest: float
    orders: Orders
    compiled: Compiled


class Programs:
    """The programs of one pipeline on this rank, by the value of their schedule and their mode; `KEPT` of them."""

    def __init__(
        self,
        placement: Placement,
        context: Context,
        stages: Mapping[int, Stage],
        gradients: Gradients,
        promise: Promise | None,
        overlap: Overlap | None,
        cost: CostModel | None,
        routes: Routes = (),
    ) -> None:
        self._placement = placement
        self._context = context
        self._stages = stages
        self._gradients = gradients
        self._promise = promise
        self._overlap = overlap
        self._cost = cost
        self._routes = routes
        self._kept: list[Runnable] = []  # the one used last first

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drops them all: they hold on to the transport's channels."""
        self._kept.clear()

    def get(self, schedule: Schedule, mode: Mode) -> Runnable:
        """What runs `schedule` in this mode. Raises UsageError for a schedule that is not sound, whose placement is
        another one, or that has no backwards to train with.
        """
        for position, kept in enumerate(self._kept):
            if kept.mode == mode and (kept.schedule is schedule or kept.schedule == schedule):
                if position:
                    self._kept.insert(0, self._kept.pop(position))
                return kept
        self._context.alarm.expect_slow()  # stages may be compiled, too
        require_sound(schedule, self._placement)
        for stage in self._stages.values():
            require_placed(stage.module, self._context.device)
        made = Runnable(schedule, mode, digest_of(schedule), orders_of(schedule), self._compile(schedule, mode))
        self._kept = [made, *self._kept[: KEPT - 1]]
        return made

    def _compile(self, schedule: Schedule, mode: Mode) -> Compiled:
        ran = self._training(schedule, reduce=mode.reduce) if mode.training else schedule.forward_only()
        ran = ran.first(mode.microbatches)
        if self._overlap is None:
            ran = ran.without_pairs()
        holds = self._promise is not None and (mode.training or self._promise.is_open)  # for any batch to evaluate, too
        return compile_program(
            lower(ran, self._cost, self._routes)[self._context.transport.rank],
            schedule=ran,
            routes=self._routes,
            stages=self._stages,
            transport=self._context.transport,
            promise=self._promise if holds else None,
            training=mode.training,
            overlap=self._overlap,
            gradients=self._gradients,
            reduce=mode.reduce,
        )

    def _training(self, schedule: Schedule, *, reduce: bool) -> Schedule:
        """The schedule with the reductions that there are to be."""
        if schedule.is_forward_only:
            raise UsageError(f"schedule {schedule.name!r} has no backwards: pass forward_only=True")
        if not reduce:
            return schedule.without_reductions()  # then copies are exchanged at the end
        has_others = self._context.data.size > 1 or len(self._placement.paths) > 1
        return schedule.with_reductions() if has_others else schedule


def require_sound(schedule: Schedule, placement: Placement) -> None:
    """Raises UsageError unless `schedule` is a sound one for stages that lie as in `placement`."""
    if schedule.placement != placement:
        raise UsageError(
            f"schedule {schedule.name!r} has another placement than this Pipeline's stages: "
            f"{schedule.placement.paths}, not {placement.paths}; make a Pipeline for it"
        )
    if violations := verify(schedule):
        raise ScheduleError(f"schedule {schedule.name!r} is not sound:", violations)


def digest_of(schedule: Schedule) -> float:
    """A number that follows from the schedule's value, exact in float64."""
    value = repr((schedule.name, schedule.placement, schedule.num_microbatches)) + schedule.to_csv()
    return float(int.from_bytes(hashlib.sha256(value.encode()).digest()[:6]))
