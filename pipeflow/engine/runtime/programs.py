"""Programs: the compiled programs of a pipeline on this rank. A program is compiled when a schedule is first used. Must
not contain: batches and losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verify import verify
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather, connect_devices, told_alike
from pipeflow.engine.runtime.confirmation import Confirmation
from pipeflow.engine.runtime.devices import require_placed
from pipeflow.engine.runtime.gradients.step_end import Gradients
from pipeflow.engine.runtime.program.compile import Compiled, RunMode, channels_of, compile_program
from pipeflow.engine.runtime.program.pairs import Overlap
from pipeflow.engine.runtime.program.saved import HostMemory
from pipeflow.engine.runtime.program.slots import Promise
from pipeflow.engine.runtime.stage import Stage

KEPT = 16  # compiled programs of one pipeline, the most recently used ones


class Options(NamedTuple):
    """The options of a Pipeline on which its programs depend.

    Attributes:
        promise: the shape and dtype of activations, if they are known in advance.
        overlap: runs a pair; None to run the forward before the backward.
        cost: the times of stages and links, by which receives are posted; None if links take no time.
        routes: pairs of stages that are not neighbours, of which the first sends to the second.
    """

    promise: Promise | None
    overlap: Overlap | None
    cost: CostModel | None
    routes: Routes


class Programs:
    """The programs of one pipeline on this rank, by schedule and mode. Keeps the `KEPT` most recently used ones."""

    def __init__(
        self,
        placement: Placement,
        context: Context,
        stages: Mapping[int, Stage],
        gradients: Gradients,
        options: Options,
    ) -> None:
        self.placement = placement
        self.context = context
        self.stages = stages
        self.gradients = gradients
        self.options = options
        self.host = HostMemory(context.device)
        self.confirmation = Confirmation(context)
        self._kept: list[Compiled] = []  # the most recently used one first
        self._sizes: list[int] = []  # samples of each microbatch of the last step

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drops all programs, because they hold channels of the transport."""
        self._kept.clear()
        self._sizes = []

    def fit(self, compiled: Compiled, sizes: list[int]) -> None:
        """Prepares a program for microbatches of `sizes` samples.

        If the sizes determine the lengths of messages and have changed since the last step of any program, the ranks of
        the pipeline compare them first: gloo would end a process whose message is too long. Raises UsageError on all of
        them if the sizes differ, also if they have changed on some ranks alone.
        """
        promise, transport = self.options.promise, self.context.transport
        if promise is not None and promise.is_open and sizes != self._sizes:
            transport.place.suspects = True
            try:
                read = all_gather(transport, [float(sum(sizes)), float(len(sizes))])
            finally:
                transport.place.suspects = False
            with told_alike(transport):
                if any(row != read[0] for row in read):
                    said = [f"{samples:g} samples in {microbatches:g} microbatches" for samples, microbatches in read]
                    raise UsageError(
                        "the ranks of a pipeline must read the same batch and run the same schedule, but they have "
                        + ", ".join(f"{what} (rank {transport.world_rank(rank)})" for rank, what in enumerate(said))
                    )
            self._sizes = sizes
        compiled.fit(sizes)

    def get(self, schedule: Schedule, mode: RunMode) -> Compiled:
        """The program for `schedule` in this mode, compiled on first use.

        Raises UsageError for a schedule that is not sound, has another placement, or has no backwards when training.
        """
        for position, kept in enumerate(self._kept):
            if kept.mode == mode and (kept.schedule is schedule or kept.schedule == schedule):
                if position:
                    self._kept.insert(0, self._kept.pop(position))
                return kept
        self.context.alarm.expect_slow()  # stages may be compiled, too
        require_sound(schedule, self.placement)
        for stage in self.stages.values():
            require_placed(stage.module, self.context.device)
        made = self._compile(schedule, mode)
        self._kept = [made, *self._kept[: KEPT - 1]]
        return made

    def _compile(self, schedule: Schedule, mode: RunMode) -> Compiled:
        ran = self._training(schedule, reduce=mode.reduce) if mode.training else schedule.forward_only()
        ran = ran.first(mode.microbatches)
        if self.options.overlap is None:
            ran = ran.without_pairs()
        context, transport = self.context, self.context.transport
        holds = self.options.promise is not None and (
            mode.training or self.options.promise.is_open
        )  # open: any batch size
        program = lower(ran, self.options.cost, self.options.routes)[transport.rank]
        transport.connect(channels_of(program, transport.rank, known=holds))
        context.tensor.connect()
        if mode.training:  # replicas may evaluate at other times, or alone
            connect_devices(context.world)
            self.gradients.connect()
        return compile_program(
            program,
            ran,
            schedule,
            mode,
            routes=self.options.routes,
            stages=self.stages,
            transport=transport,
            host=self.host,
            promise=self.options.promise if holds else None,
            overlap=self.options.overlap,
            gradients=self.gradients,
            step=self.confirmation.step,
        )

    def _training(self, schedule: Schedule, *, reduce: bool) -> Schedule:
        """The schedule with the reductions that the step needs."""
        if schedule.is_forward_only:
            raise UsageError(f"schedule {schedule.name!r} has no backwards: pass forward_only=True")
        steps = Kind.S in schedule.kinds
        if steps and self.confirmation.stepper is None:
            raise UsageError(
                f"schedule {schedule.name!r} steps the optimizer (S), but the Pipeline has none: make a "
                "pipeflow.PipelinedOptimizer(model, optimizer), or use the schedule without these steps"
            )
        if steps and not reduce:
            raise UsageError(
                f"schedule {schedule.name!r} steps the optimizer (S) in every call, so gradients of several calls "
                "cannot be accumulated with reduce=False: use the schedule without these steps"
            )
        if not reduce:
            return schedule.without_reductions()  # then copies are exchanged at the end
        has_others = self.context.data.size > 1 or len(self.placement.paths) > 1
        return schedule.with_reductions() if has_others else schedule


def require_sound(schedule: Schedule, placement: Placement) -> None:
    """Raises UsageError unless `schedule` has this placement, and ScheduleError unless it is sound."""
    if schedule.placement != placement:
        raise UsageError(
            f"schedule {schedule.name!r} has another placement than this Pipeline's stages: "
            f"{schedule.placement.paths}, not {placement.paths}; make a Pipeline for it"
        )
    if violations := verify(schedule):
        raise ScheduleError(f"schedule {schedule.name!r} is not sound:", violations)
