"""Executed: the schedule that a timeline ran. Must not contain: checks of that schedule."""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.core.action import Action, Entry, Kind, Pair
from pipeflow.core.dataflow import DATAFLOW, Stream, Value, makes, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline


def executed_schedule(timeline: Timeline) -> Schedule:
    """The schedule that a timeline ran: per rank, its actions in the order of their starts.

    A joint action beside the computations starts when the last rank reaches it, so its start does not show its position
    in a row. It is put directly after the action that made what it needs.

    Raises UsageError if the numbers of the microbatches cannot be right.
    """
    actions = [span.action for span in timeline]
    microbatches = max((action.microbatch for action in actions), default=0) + 1
    if microbatches > max(len(actions), 1):
        raise UsageError(f"{len(actions)} actions are too few for {microbatches} microbatches")
    rows = tuple(tuple(_entries(row, timeline.placement.num_stages)) for row in timeline.rows)
    return Schedule(timeline.name, timeline.placement, microbatches, rows)


def _entries(row: Row, num_stages: int) -> Iterator[Entry]:
    """The entries of a row. Joint actions whose inputs nothing in the row made come last."""
    joint = [span.action for span in row if _is_beside(span)]
    waiting: dict[Value, Action] = {value: action for action in joint for value in needs(action, num_stages)}
    for span in (span for span in row if not _is_beside(span)):
        if span.partner is None:
            yield span.action
        elif span.action.kind is Kind.F:
            yield Pair(span.action, span.partner)
        yield from (waiting.pop(value) for value in makes(span.action, num_stages) if value in waiting)
    yield from dict.fromkeys(waiting.values())


def _is_beside(span: Span) -> bool:
    return DATAFLOW[span.action.kind].joint and span.stream is not Stream.COMPUTE
