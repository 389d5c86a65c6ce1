"""Causes: why the actions of a timeline started when they did, and the chain of actions that makes up its makespan.
Must not contain: drawing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import DATAFLOW, AtStage, Key, Stream, Value, flows, makers
from pipeflow.core.rows import first_uses
from pipeflow.core.timeline import Row, Span, Timeline, require_timeline

SENTENCES = {
    "at_once": "{action} on rank {rank} began at once",
    "after": "{action} on rank {rank} came after {other}",
    "waited": "{action} on rank {rank} waited for the {value} from rank {source}",
}

IDLE = {  # of a rank, before an action whose cause is one of SENTENCES, or else until the end of the step
    "idle": "Idle for {time} ({first} to {last})",
    "done": "nothing is left to do on rank {rank} after {action}",
    "empty": "rank {rank} has nothing to do",
}

LATE = 2.0  # times the usual transfer: a value has arrived by then
LATE_ACTION = 1.5  # times the usual time of the action's kind and stage
FEW = 3  # waits for the values of a link: fewer do not show how long they take
STEADY = 1.1  # times the shortest delay: values that take as long were waited for
SHORTEST = 1e-3  # shares of the step: shorter pauses are part of the engine's own work
Link = tuple[int, int]  # from rank, to rank


class Cause(NamedTuple):
    """Why a span did not start earlier. `str` gives it as one sentence.

    Attributes:
        span: the span.
        after: the span that ended before it could start. None if it started at once.
        value: the value that it waited for, from another rank or from another stream of its own rank. None if it waited
            for other work on its own rank.
    """

    span: Span
    after: Span | None
    value: Value | None

    def __str__(self) -> str:
        it = {"action": self.span.action, "rank": self.span.rank}
        if self.after is None:
            return SENTENCES["at_once"].format(**it)
        if self.value is None:
            return SENTENCES["after"].format(**it, other=self.after.action)
        return SENTENCES["waited"].format(**it, value=self.value, source=self.after.rank)


def causes(timeline: Timeline) -> tuple[tuple[Cause, ...], ...]:
    """Per rank and span, the cause: the span before it on its stream, or the span elsewhere that made its input. A
    reduction has several possible causes: the spans that its rank, and the other ranks that take part in it, ran
    before. The latest of them is its cause.

    The time of a transfer is not known from a timeline. So an input made before the rank was free counts as the
    cause only if the rank was idle for more than a twentieth of the span. If ranks also pause where nothing can be
    missing, the timeline was measured, and such a pause may be work of the engine. Then the input counts only if it
    usually arrives after the rank was free.
    """
    run = _RunIndex(timeline)
    return tuple(tuple(run.cause(span) for span in row) for row in timeline.rows)


def critical_path(timeline: Timeline) -> tuple[Cause, ...]:
    """The chain of spans that the makespan consists of, earliest first. The cause of each span is the span before it in
    the chain. The chain ends in a reduction only if the reduction ends after all computations. If the timeline could
    not run, the chain may be a cycle; it then begins where it would reach a span for the second time.
    """
    run = _RunIndex(timeline)
    last = max((row[-1] for row in run.rows() if row), key=lambda span: span.end, default=None)
    return tuple(reversed([*chain(last, run.cause)]))


def chain(span: Span | None, cause_of: Callable[[Span], Cause]) -> Iterator[Cause]:
    """The causes of a span, of the span that it came after, and so on back to the start, latest first. A chain that is
    a cycle ends before it reaches a span for the second time.
    """
    seen: set[int] = set()
    while span is not None and id(span) not in seen:
        seen.add(id(span))
        cause = cause_of(span)
        yield cause
        span = cause.after


def hand_overs(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """For each value that passes between ranks, the span that made it and the computation that needs it."""
    run = _RunIndex(timeline)
    for span in (span for row in run.streams[Stream.COMPUTE] for span in row):
        yield from ((maker, span) for maker, _ in run.inputs(span.action, span.rank) if maker.rank != span.rank)


class Arrival(NamedTuple):
    """A value of another rank, and the action before which it came last.

    Attributes:
        span, maker, value: the action, the one that made the value, and the value.
        pause: the time for which the rank stood still before the action.
    """

    span: Span
    maker: Span
    value: Value
    pause: float

    @property
    def delay(self) -> float:
        """The time from when the value was made until the action began."""
        return self.span.start - self.maker.end

    @property
    def link(self) -> Link:
        """The ranks that the value passed between."""
        return self.maker.rank, self.span.rank


def arrivals(timeline: Timeline) -> list[Arrival]:
    """The values of other ranks before which computations cannot begin."""
    return _RunIndex(timeline).arrivals


def awaited(timeline: Timeline) -> dict[Link, list[Arrival]]:
    """Per link, the arrivals that held up their ranks: of values that were made when the rank was idle, or of others if
    longer pauses end with the shortest delay of all values of the link. The delay is the time of a transfer as the
    timeline shows it. Links are left out that show too few.
    """
    return {link: found.every for link, found in _RunIndex(timeline).links.items() if found.is_known}


def transfer_times(timeline: Timeline) -> Mapping[Link, float]:
    """Per pair of ranks (from, to), the time that a value usually takes: the lower quartile of the delays of values
    that were made when the rank was idle, without its usual pause. If these are few, the shortest delay of those that
    are `awaited`; if there are none, the median of other links.
    """
    return _RunIndex(timeline).transfers


def lower_quartile(times: Sequence[float]) -> float:
    """The lower quartile, which late ones do not move."""
    return sorted(times)[len(times) // 4]


def pauses(timeline: Timeline, latency: Callable[[Link], float]) -> Iterator[tuple[Span, float]]:
    """The computations whose inputs had all arrived when their rank had ended the one before, with the time from then
    until they began. An input has arrived if its own rank made it, or another rank at least a `latency` of their link
    before.
    """
    run = _RunIndex(timeline)
    for row in run.streams[Stream.COMPUTE]:
        for previous, span in pairwise(row):
            sent = run.sent(span)
            if previous.partner is None and (
                sent is None or sent[0].end + latency((sent[0].rank, span.rank)) <= previous.end
            ):
                yield span, span.start - previous.end


class Usual:
    """The usual times of the computations of a timeline: by kind, stage and slice, the lower quartile, which late ones
    do not move.
    """

    def __init__(self, timeline: Timeline) -> None:
        found: dict[tuple[Kind, int, int | None], list[float]] = defaultdict(list)
        for row in timeline.on(Stream.COMPUTE):
            for span in row:
                found[span.action.kind, span.action.stage, span.action.slice].append(span.end - span.start)
        self._times = {key: lower_quartile(times) for key, times in found.items()}

    def of(self, action: Action) -> float:
        """The usual time of a computation like this one."""
        return self._times[action.kind, action.stage, action.slice]

    def late(self, span: Span) -> float:
        """By how much a computation took longer than is usual for its kind, stage and slice; 0 if that is little."""
        usual = self.of(span.action)
        extra = span.end - span.start - usual
        return extra if extra > (LATE_ACTION - 1) * usual else 0.0


NOTHING = AtStage((), ())  # for actions of stages that do not exist
Sent = tuple[Span, Value]


class _OfLink(NamedTuple):
    """What a timeline shows of a link.

    Attributes:
        every: the arrivals that held up their rank.
        usual: the time that a value usually takes.
        is_known: whether it shows these at all.
    """

    every: list[Arrival]
    usual: float
    is_known: bool

    @classmethod
    def of(cls, own: Sequence[Arrival], pause: float, least: float) -> _OfLink:
        """That of a link with these arrivals, to a rank with this usual pause. Longer pauses are at least a time longer
        than that.
        """
        shortest = min(each.delay for each in own)
        idle = [each for each in own if each.delay < each.pause]
        steady = [each for each in own if each.pause > pause + least and each.delay <= STEADY * shortest]
        is_known = len(idle) >= FEW or len(steady) >= FEW or any(each.delay < each.pause for each in steady)
        usual = lower_quartile([each.delay for each in idle]) if len(idle) >= FEW else shortest
        return cls(list(dict.fromkeys([*idle, *steady])), max(usual - pause, 0.0), is_known)


class _RunIndex:
    """A timeline with an index of where every action ran."""

    def __init__(self, timeline: Timeline) -> None:
        require_timeline(timeline)
        self.makespan = timeline.makespan
        self.streams = {stream: timeline.on(stream) for stream in (Stream.COMPUTE, *timeline.streams)}
        self._flows = flows(timeline.placement.num_stages, (), timeline.slices)
        self._places: dict[Key, tuple[Row, int]] = {}
        self._again: dict[int, int] = {}  # per span whose action ran before, its position
        for row in self.rows():
            for position, span in enumerate(row):
                key = span.action.kind, *span.action.work
                if key in self._places:
                    self._again[id(span)] = position
                else:
                    self._places[key] = row, position
        self._first_uses = [first_uses(span.action for span in row) for row in timeline.rows]
        self._joint: dict[tuple[Kind, int], list[Span]] = defaultdict(list)  # per kind and stage, on all ranks
        for span in (span for row in self.rows() for span in row if DATAFLOW[span.action.kind].joint):
            self._joint[span.action.kind, span.action.stage].append(span)

    def rows(self) -> Iterator[Row]:
        """The rows of all ranks and streams, computations first."""
        for rows in self.streams.values():
            yield from rows

    def cause(self, span: Span) -> Cause:
        return self._of_computation(span) if span.stream is Stream.COMPUTE else self._beside(span)

    def sent(self, span: Span) -> Sent | None:
        """For a computation, the last span to end that made an input of it on another rank or stream, with that input.
        A pair starts when both its actions have their inputs, and its outputs exist when both have ended.
        """
        actions = (span.action,) if span.partner is None else (span.action, span.partner)
        made = [each for action in actions for each in self.inputs(action, span.rank)]
        return max(made, key=lambda each: each[0].end, default=None)

    def inputs(self, action: Action, rank: int) -> Iterator[Sent]:
        """The spans on other ranks and streams that made the inputs of a computation, each with that input."""
        mine = self.streams[Stream.COMPUTE][rank]
        for value in self._needs(action, rank):
            for key in makers(value):
                row, position = self._places.get(key, (mine, 0))
                if row is not mine:
                    maker = row[position]
                    if maker.partner is not None and row[position + 1 : position + 2]:
                        following = row[position + 1]
                        maker = following if following.action == maker.partner else maker
                    yield maker, value

    @cached_property
    def arrivals(self) -> list[Arrival]:
        found = list[Arrival]()
        for row in self.streams[Stream.COMPUTE]:
            for previous, span in zip((None, *row), row, strict=False):
                free, sent = 0.0 if previous is None else previous.end, self.sent(span)
                if sent is not None and sent[0].rank != span.rank:
                    found.append(Arrival(span, *sent, span.start - free))
        return found

    @cached_property
    def links(self) -> Mapping[Link, _OfLink]:
        """What each link shows."""
        by_link: dict[Link, list[Arrival]] = defaultdict(list)
        for each in self.arrivals:
            by_link[each.link].append(each)
        gaps = [[b.start - a.end for a, b in pairwise(row)] for row in self.streams[Stream.COMPUTE]]
        usual, least = [lower_quartile(own or [0.0]) for own in gaps], SHORTEST * self.makespan
        return {link: _OfLink.of(own, usual[link[1]], least) for link, own in by_link.items()}

    @cached_property
    def transfers(self) -> Mapping[Link, float]:
        known = [each.usual for each in self.links.values() if each.is_known]
        middle = median(known) if known else 0.0
        return {link: each.usual if each.is_known else middle for link, each in self.links.items()}

    @cached_property
    def _is_measured(self) -> bool:
        """Whether a rank paused between two computations although it had made all that the second one needs."""
        return any(
            span.start > previous.end and previous.partner is None and self.sent(span) is None
            for row in self.streams[Stream.COMPUTE]
            for previous, span in pairwise(row)
        )

    @cached_property
    def _waits(self) -> Mapping[Link, float]:
        """Per link, the lower quartile of the waits of idle ranks for its values."""
        found: dict[Link, list[float]] = defaultdict(list)
        for each in self.arrivals:
            if each.delay < each.pause:
                found[each.link].append(each.delay)
        return {link: lower_quartile(delays) for link, delays in found.items()}

    def _had_arrived(self, maker: Span, previous: Span, span: Span) -> bool:
        """Whether what `maker` made was there when `previous` ended, as far as can be known."""
        if not self._is_measured:
            return False  # nothing but the transfer can have taken the time
        return maker.end + LATE * self._waits.get((maker.rank, span.rank), 0.0) <= previous.end

    def _needs(self, action: Action, rank: int) -> Iterator[Value]:
        for end in self._flows.get((action.kind, action.stage, action.slice), NOTHING).needs:
            yield end.of(action.microbatch)
        if lasting := self._first_uses[rank].get(action):
            yield lasting

    def _before(self, span: Span) -> Span | None:
        """The span before it on its stream."""
        action = span.action
        row, position = self._places[action.kind, *action.work]
        if (again := self._again.get(id(span))) is not None:
            row, position = self.streams[span.stream][span.rank], again
        return row[position - 1] if position else None

    def _of_computation(self, span: Span) -> Cause:
        previous, sent = self._before(span), self.sent(span)
        if sent is None or (previous is not None and previous.partner == span.action):
            return Cause(span, previous, None)
        maker, value = sent
        if previous is not None and maker.end <= previous.end:
            waited = span.start - previous.end > (span.end - span.start) / 20
            if not waited or self._had_arrived(maker, previous, span):
                return Cause(span, previous, None)
        return Cause(span, maker, value)

    def _beside(self, span: Span) -> Cause:
        """The cause of a span that runs beside computations. It starts when every rank that takes part has finished the
        entries before it in its row and on its stream. If several of these end at once, the span of the own rank is the
        cause.
        """
        joint = self._joint.get((span.action.kind, span.action.stage), [])
        parts = [span, *(part for part in joint if part.rank != span.rank)]
        made = [self._made(part.action, span) for part in parts]
        before = [each for part in parts if (each := self._before(part)) and each.start < span.start]
        ran = [self._ran(part.rank, span.start) for part in parts]
        ended = [each for each in (*made, *before, *ran) if each and (each.end <= span.start or each is made[0])]
        after = max(ended, key=lambda each: each.end, default=None)
        if after is None or after.rank == span.rank:
            return Cause(span, after, None)
        [(content, _), *_] = DATAFLOW[span.action.kind].needs
        its = next((part for part in parts if part.rank == after.rank), span).action
        return Cause(span, after, Value(content, its.stage, its.microbatch, slice=its.slice))

    def _made(self, action: Action, span: Span) -> Span | None:
        """The last span before `span` that made what `action` needs, of another kind: a reduction makes it again."""
        needs = self._flows.get((action.kind, action.stage, action.slice), NOTHING).needs
        keys = [key for end in needs for key in makers(end.of(action.microbatch)) if key[0] is not action.kind]
        made = [row[position] for row, position in (self._places[key] for key in keys if key in self._places)]
        return max((maker for maker in made if maker.start <= span.start), key=lambda maker: maker.end, default=None)

    def _ran(self, rank: int, time: float) -> Span | None:
        """The last computation of a rank that had ended at `time`."""
        row = self.streams[Stream.COMPUTE][rank]
        position = bisect_right(row, time, key=lambda span: span.end)
        return row[position - 1] if position else None
