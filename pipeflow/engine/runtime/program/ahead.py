"""Ahead: the forwards of a step that may run before the optimizer's step before it is confirmed, and how they are taken
back. Must not contain: when a step is confirmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.dataflow import Content, Stream, Value, flows, stream_of
from pipeflow.core.route import Routes
from pipeflow.core.schedule import Schedule
from pipeflow.engine.runtime.program import operations as ops
from pipeflow.engine.runtime.program import transfers
from pipeflow.engine.runtime.program.dynamic_shapes import PostDynamic, SendDynamic, WaitDynamic
from pipeflow.engine.runtime.program.running import run


def runs_ahead(entry: Entry) -> bool:
    """Whether an entry may run before the step before is confirmed: a forward, or what runs beside the computations."""
    return isinstance(entry, Action) and (entry.kind is Kind.F or stream_of(entry) is not Stream.COMPUTE)


@dataclass(slots=True)
class Ahead:
    """The first operations of a program, before those of its first backward.

    Attributes:
        end: the number of these operations.
        again: those that run again if the weights were wrong. The receives of gradients stay posted.
        rest: the receives of what other ranks send ahead that are not complete at `end`.
        sent: the sends among them.
        beside: those among them that started an action beside the computations.
    """

    end: int
    again: list[ops.Operation]
    rest: Sequence[transfers.ChannelOperation]
    sent: Sequence[transfers.ChannelOperation]
    beside: Sequence[ops.Beside]

    def take_back(self) -> None:
        """Completes all transfers of the forwards that ran on any rank; what was received is replaced by the next
        receives. All ranks call it together.
        """
        for each in self.beside:
            each.end()
        run(self.rest)
        for operation in self.sent:
            operation.link.wait(operation.payload.works)
            operation.payload.works = []


def split_ahead(
    operations: Sequence[ops.Operation], end: int, schedule: Schedule, routes: Routes
) -> tuple[list[ops.Operation], Ahead]:
    """The operations of a rank of `schedule`, and those of them that run ahead: the first `end`. Receives of what no
    rank sends ahead are posted after these.
    """
    sent = _sent_ahead(schedule, routes)
    first = [each for each in operations[:end] if not _is_late(each, sent)]
    late = [each for each in operations[:end] if _is_late(each, sent)]
    rest = [
        each
        for each in (*late, *operations[end:])
        if isinstance(each, _RECEIVES) and type(each) is not transfers.ReleaseSent and each.value in sent
    ]
    ahead = Ahead(
        len(first),
        [each for each in first if not isinstance(each, transfers.PostGradient)],
        rest,
        [each for each in first if isinstance(each, SendDynamic | transfers.SendActivation)],
        [each for each in first if isinstance(each, ops.Beside)],
    )
    return [*first, *late, *operations[end:]], ahead


_POSTS = PostDynamic | transfers.PostActivation
_RECEIVES = _POSTS | WaitDynamic | transfers.AwaitReceive


def _is_late(operation: ops.Operation, sent: frozenset[Value]) -> bool:
    """Whether an operation posts the receive of an activation that is not sent ahead."""
    return isinstance(operation, _POSTS) and operation.value not in sent


def _sent_ahead(schedule: Schedule, routes: Routes) -> frozenset[Value]:
    """The activations that the forwards of all ranks make ahead."""
    table = flows(schedule.placement.num_stages, routes)
    ahead: Iterable[Entry] = (entry for row in schedule.rows for entry in takewhile(runs_ahead, row))
    ends = (
        (end, action.microbatch)
        for action in ahead
        if isinstance(action, Action)
        for end in table[action.kind, action.stage].makes
    )
    return frozenset(end.of(microbatch) for end, microbatch in ends if end.content is Content.ACTIVATION)
