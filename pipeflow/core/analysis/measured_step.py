"""What a timeline shows: the schedule that it ran, and its costs. Must not contain: measuring, which the engine does,
and checks of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from pipeflow.core.action import Action, Entry, Kind, Pair
from pipeflow.core.analysis.idle_time import pauses, waits
from pipeflow.core.cost import CostModel, costs_of
from pipeflow.core.dataflow import DATAFLOW, Stream, Value, makes, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Row, Span, Timeline, require_timeline


def executed_schedule(timeline: Timeline) -> Schedule:
    """The schedule that a timeline ran: per rank, its actions in the order of their starts.

    A joint action beside the computations starts when the last rank reaches it, so its start does not show its position
    in a row. It is put directly after the action that made what it needs.

    Raises UsageError if the numbers of the microbatches cannot be right.
    """
    require_timeline(timeline)
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


COPIED = (Kind.O, Kind.L)
"""The kinds of action whose time is that of a copy between a device and its host."""


def measured_costs(timeline: Timeline) -> CostModel:
    """The costs that a timeline shows. The time of an action is the mean over the actions of its kind and stage. It
    includes the time before an action in which the rank has all inputs, since the engine itself works then. The latency
    is the mean time that an idle rank waited for a value after it was made. The time of a whole backward is divided
    between its halves in the proportion of the backwards that ran in halves, or equally if there are none. When several
    ranks reduce a stage together, the last one to start waits least, so its time is the cost of the reduction.
    """
    require_timeline(timeline)
    times: dict[tuple[Kind, int], list[float]] = {}
    for span in timeline:
        times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)

    latency = max(fmean(waits(timeline) or [0.0]), 0.0)  # clocks of ranks differ a little
    between = {kind: fmean(gaps) for kind, gaps in pauses(timeline, latency).items()}

    def mean(kind: Kind, stage: int) -> float:
        found = times.get((kind, stage))
        return fmean(found) + between.get(kind, 0.0) if found else 0.0

    def halves(stage: int) -> tuple[float, float]:
        """The times of the two halves of the mean backward on `stage`."""
        whole, apart = len(times.get((Kind.B, stage), ())), len(times.get((Kind.I, stage), ()))
        first, second = mean(Kind.I, stage), mean(Kind.W, stage)
        both = (whole * mean(Kind.B, stage) + apart * (first + second)) / max(whole + apart, 1)
        part = first / (first + second) if first + second else 0.5
        return both * part, both * (1 - part)

    def copy(stage: int) -> float:
        """The mean time of the copies of a stage; of all stages if it has none."""
        own = [time for kind in COPIED for time in times.get((kind, stage), ())]
        return fmean(own or [time for (kind, _), each in times.items() if kind in COPIED for time in each])

    stages = range(timeline.placement.num_stages)
    kinds = {kind for kind, _ in times}
    backward_input, backward_weight = zip(*map(halves, stages), strict=True)
    found = {kind: tuple(mean(kind, stage) for stage in stages) for kind in sorted(kinds) if not DATAFLOW[kind].takes}
    found |= {Kind.F: tuple(mean(Kind.F, stage) for stage in stages), Kind.I: backward_input, Kind.W: backward_weight}
    if Kind.R in kinds:
        found[Kind.R] = tuple(min(times.get((Kind.R, stage), [0.0])) for stage in stages)
    if Kind.C in kinds:
        found[Kind.C] = tuple(mean(Kind.C, stage) or mean(Kind.F, stage) for stage in stages)
    if kinds & {*COPIED}:
        found[Kind.O] = tuple(map(copy, stages))
    return costs_of(found, latency=latency, unit=timeline.unit)
