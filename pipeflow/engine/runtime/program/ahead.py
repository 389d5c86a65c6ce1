"""Ahead: the forwards of a step that may run before the optimizer's step before it is confirmed, and how they run again
if its weights were wrong; the random numbers of what runs again. Must not contain: how a step is confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.dataflow import Content, Stream, Value, flows, stream_of
from pipeflow.core.route import Routes
from pipeflow.core.schedule import Schedule
from pipeflow.engine.runtime.program.operations import Beside, Doing, Operation, run
from pipeflow.engine.runtime.program.wires import Wire
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.tensor.random import current_tracker, replay_of
from pipeflow.engine.torch_private.tensors import default_states, set_default_states


def remembered(device: torch.device) -> Callable[[], None]:
    """Remembers the random generators of this rank, and returns a function that gives them their states of now."""
    devices = [device] if device.type == "cuda" else []
    states, tracker = default_states(devices), current_tracker()
    tracked = {} if tracker is None else tracker.get_state()

    def restore() -> None:
        set_default_states(states, devices)
        if tracker is not None:
            tracker.set_state(tracked)

    return restore


def runs_ahead(entry: Entry) -> bool:
    """Whether an entry may run before the step before is confirmed: a forward, or what runs beside the computations."""
    return isinstance(entry, Action) and (entry.kind is Kind.F or stream_of(entry) is not Stream.COMPUTE)


@dataclass(frozen=True, slots=True)
class Ahead:
    """The operations of a program before those of its first backward.

    Attributes:
        first: these operations.
        rest: the receives of what other ranks send ahead that are not complete after these.
    """

    first: Sequence[Operation]
    rest: Sequence[Operation]

    def run(self, stages: Sequence[Stage], device: torch.device, confirm: Callable[[], bool]) -> None:
        """Runs the first operations, then `confirm`. If it returns False, the weights were wrong: runs them again, on
        all ranks, from the state that the `stages` and the random generators had.
        """
        replayed = replay_of("a stage of this rank", device)
        states = [stage.state.now() for stage in stages]
        run(self.first)
        for stage in stages:
            stage.state.ran()
        if confirm():
            return
        self._take_back()
        for stage, state in zip(stages, states, strict=True):
            state.restore()
            if stage.deferral.copies is not None:
                stage.deferral.copies.clear()  # of other weights
        with replayed():
            run(self.first)

    def _take_back(self) -> None:
        """Completes all transfers of the forwards that ran on any rank; what was received is replaced by the next
        receives. All ranks call it together.
        """
        for each in self.first:
            if each.doing is Doing.BEGIN and isinstance(each.by, Beside):
                each.by.end()
        run(self.rest)
        for each in self.first:
            if each.doing is Doing.SEND and isinstance(each.by, Wire):
                each.by.release()


def split_ahead(
    operations: Sequence[Operation], end: int, schedule: Schedule, routes: Routes
) -> tuple[list[Operation], Ahead]:
    """The operations of a rank of `schedule`, and those of them that run ahead: some of the first `end`. Receives of
    what no rank sends ahead are posted after these.
    """
    sent = _sent_ahead(schedule, routes)
    first = [each for each in operations[:end] if not _is_late(each, sent)]
    others = [*(each for each in operations[:end] if _is_late(each, sent)), *operations[end:]]
    rest = [each for each in others if each.doing in (Doing.POST, Doing.WAIT) and each.what in sent]
    return [*first, *others], Ahead(first, rest)


def _is_late(operation: Operation, sent: frozenset[Value]) -> bool:
    """Whether an operation posts the receive of what is not sent ahead."""
    return operation.doing is Doing.POST and operation.what not in sent


def _sent_ahead(schedule: Schedule, routes: Routes) -> frozenset[Value]:
    """The activations that the forwards of all ranks make ahead."""
    table = flows(schedule.placement.num_stages, routes, schedule.slices)
    ahead: Iterable[Entry] = (entry for row in schedule.rows for entry in takewhile(runs_ahead, row))
    ends = (
        (end, action.microbatch)
        for action in ahead
        if isinstance(action, Action)
        for end in table[action.kind, action.stage, action.slice].makes
    )
    return frozenset(end.of(microbatch) for end, microbatch in ends if end.content is Content.ACTIVATION)
