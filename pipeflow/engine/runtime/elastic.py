"""A step that goes on when a rank dies: what it starts from, so that it can run again, and the batch that the ranks
that are left compute together. Must not contain: who is dead, and how channels are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import hear, tell
from pipeflow.engine.runtime.loss import AgreementRow, StepCall
from pipeflow.engine.runtime.microbatch import Along, Batch, Divided, Whole, joined, next_of
from pipeflow.engine.runtime.program.ahead import remembered
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.stages.module_state import Snapshot
from pipeflow.engine.torch_private.trees import tree_leaves

SEARCHED = {Kind.F, Kind.B, Kind.I, Kind.W, Kind.R}


def require_elastic(schedule: Schedule, refused: Mapping[str, bool]) -> None:
    """Raises UsageError unless the ranks that are left could run `schedule` without those that have died. `refused` are
    names of arguments that would prevent it, and whether they were given.
    """
    if more := sorted(schedule.kinds - SEARCHED):
        raise UsageError(
            f"schedule {schedule.name!r} has actions of kind {more[0]}, without which elastic=True goes on: give "
            f"schedule.without({', '.join(f'Kind.{kind}' for kind in more)})"
        )
    if schedule.slices > 1:
        raise UsageError("elastic=True does not go on with slices: make the schedule without slices=")
    for name, is_given in refused.items():
        if is_given:
            raise UsageError(f"elastic=True does not go on with {name}: leave it out, or launch without elastic=True")


class Tables:
    """The schedules of the ranks that are left, by the schedule of a replica, for a Pipeline.

    Args:
        model: the Pipeline.

    Attributes:
        launched: its schedule as it was made.
    """

    def __init__(self, model: Any) -> None:
        self.launched: Schedule = model.schedule
        self._model, self._context = ref(model), model.context
        self._living = self._context.living
        self._found: list[tuple[Schedule, Schedule]] = []

    def join(self) -> None:
        """Lets the Pipeline go on with the ranks that are left; all of them call it together."""
        if (model := self._model()) is not None:
            model.schedule = self.of(self.launched)
            model.runner.join(model.schedule.placement)

    def of(self, schedule: Schedule) -> Schedule:
        """The schedule that the ranks of the context run for `schedule` on each replica. Raises UsageError as
        `require_elastic` does.
        """
        context = self._context
        require_elastic(schedule, {})
        if context.living != self._living:
            self._living, self._found = context.living, []
        if not context.is_joined:
            return schedule
        known = next((table for each, table in self._found if each is schedule or each == schedule), None)
        if known is None:
            assert Schedule.of_survivors is not None  # the package has set it
            dead = set(range(context.launched.world_size)) - set(context.living)
            known = Schedule.of_survivors(schedule, context.launched.data, dead)
            self._found.append((schedule, known))
        return known


@dataclass(eq=False)
class Retried:
    """A step that can run again: the batch that it took, and what it started from.

    Args:
        data_iter: the iterator of batches.
        model: the module whose gradients it changes.
        stages: the stages that it runs.
        device: their device.
    """

    data_iter: Iterator[object]
    model: nn.Module
    stages: list[Stage]
    device: torch.device
    _batch: object = None
    _undo: Callable[[], None] | None = None

    def begin(self) -> Iterator[object]:
        """Call before each run. Returns the batch, in an iterator; from the second time on, everything is as before the
        first.
        """
        if self._undo is not None:
            self._undo()
        else:
            self._batch, self._undo = next_of(self.data_iter), self._kept()
        return iter([self._batch])

    def _kept(self) -> Callable[[], None]:
        generators = remembered(self.device)
        states: list[Snapshot] = []
        for stage in self.stages:
            stage.state.renew()
            states.append(stage.state.now())
        gradients = {each: None if each.grad is None else each.grad.clone() for each in self.model.parameters()}

        def undo() -> None:
            generators()
            for state in states:
                state.restore()
            for parameter, gradient in gradients.items():
                parameter.grad = None if gradient is None else gradient.clone()

        return undo

    def ran(self) -> None:
        """Call when the step has ended."""
        for stage in self.stages:
            stage.state.ran()


def elastic_step(model: Any, data_iter: Iterator[object], call: StepCall) -> Any:
    """Runs a step of a Pipeline, and returns its Output. If a rank dies in it, the ranks that are left run it again.
    Raises the errors of `execute_pipeline`.
    """
    runner = model.runner
    retried = Retried(data_iter, model, [*runner.stages.values()], model.context.device)

    def run() -> tuple[Any, object]:
        if not call.reduce:
            raise UsageError("reduce=False leaves gradients on one replica, which may die: launch without elastic=True")
        if call.return_outputs:
            _require_outputs(model.context, runner.last_ranks)
        runner.end = None
        given = retried.begin()
        schedule, adapts = model.tables.of(call.schedule), call.adapts and not model.context.is_joined
        output = runner.step(given, call._replace(schedule=schedule, adapts=adapts), model.loss_scale)
        retried.ran()
        return output, [*map(tuple, runner.rows)]

    def end(told: list[tuple[float, ...]]) -> Any:
        assert runner.end is not None  # another rank has ended the step, so this one had come to its end
        return runner.end([AgreementRow(*row) for row in told])

    return model.alarm.run(call, run, end)


def _require_outputs(context: Context, holders: tuple[int, ...]) -> None:
    """Raises UsageError if a replica has no rank left that has its outputs."""
    if not context.is_joined:
        return
    if lost := set(range(context.data_size)) - {context.launched.place(context.living[rank]).data for rank in holders}:
        raise UsageError(
            f"no rank is left of replica {min(lost)} that has the last stage, to return the replica's outputs: compute "
            "what you need of them in the criterion, or call without return_outputs"
        )


def of_all_replicas(batch: Batch, given: object, context: Context) -> Batch:
    """The batch itself, or, when ranks have died, that of all replicas: the first rank of each that is left tells its
    own to the ranks of others. Microbatch m of each replica comes before microbatch m + 1 of any.

    Raises UsageError for what the ranks that are left could not tell each other; also before any rank has died.
    """
    entries = tree_leaves((batch.inputs, batch.labels), lambda each: isinstance(each, Whole | Along))
    if isinstance(given, Divided) or any(isinstance(each, Whole | Along) for each in entries):
        raise UsageError(
            "elastic=True takes batches whose tensors all have one entry per sample along dim 0, without "
            "pipeflow.Divided, Along and Whole: make such a batch, or launch without elastic=True"
        )
    if any(isinstance(each, Tensor) and each.requires_grad for each in entries):
        raise UsageError("elastic=True computes no gradients of inputs: detach them, or launch without elastic=True")
    if not context.is_joined:
        return batch
    mine: Any = batch.sizes, batch.split(batch.inputs), batch.split(batch.labels)
    everyones = list(_of_each_replica(mine, context))
    order = [
        (replica, index)
        for turn in zip_longest(*(range(len(sizes)) for sizes, *_ in everyones))
        for replica, index in enumerate(turn)
        if index is not None
    ]
    inputs, labels = ([everyones[replica][part][index] for replica, index in order] for part in (1, 2))
    sizes = [everyones[replica][0][index] for replica, index in order]
    read = [number for number, (replica, _) in enumerate(order) if replica == context.data_rank]
    return Batch(joined(inputs, _never), joined(labels, _never), sizes, batch.device, read=read)


def _of_each_replica(mine: Any, context: Context) -> Iterator[Any]:
    """What the first rank of each replica tells the others."""
    place = context.launched.place
    for replica, reader in enumerate(context.readers):
        if replica == context.data_rank:
            others = [rank for rank, was in enumerate(context.living) if place(was).data != replica]
            if context.rank == reader:
                tell(context.world, others, mine)
            yield mine
        else:
            yield hear(context.world, reader)


def _never(_: object) -> bool:
    return False
