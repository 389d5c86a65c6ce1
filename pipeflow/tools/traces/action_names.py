"""Recorded actions: which actions the names of ranges stand for, and when each action of a rank computed. Must not
contain: steps, and stages that no name says.
"""

from __future__ import annotations

import re
import signal
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, filterfalse, groupby, islice, pairwise
from operator import attrgetter, itemgetter
from threading import current_thread, main_thread
from typing import NamedTuple

from pipeflow.core.action import Action, Kind, Pair, actions_of, parse_entry
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.errors import UsageError
from pipeflow.tools.traces.events import Event, RankEvents

KINDS = {
    "f": Kind.F,
    "forward": Kind.F,
    "fwd": Kind.F,
    "b": Kind.B,
    "backward": Kind.B,
    "bwd": Kind.B,
    "i": Kind.I,
    "dgrad": Kind.I,
    "w": Kind.W,
    "wgrad": Kind.W,
}
KNOWN = [
    # torch.distributed.pipelining's ScheduleGPipe
    r"(?P<kind>Forward|Backward) (?P<microbatch>\d+)",
    # Megatron-core's steps, timers and spans, and DeepSpeed's instructions
    r"(?:megatron\.core\.pipeline_parallel\.schedules\.)?(?P<kind>forward|backward)[-_](?:step|compute|pass)",
    r"(?:_exec_)?(?P<kind>Forward|Backward)(?:Pass|_pass)(?:\(.*\))?",
]


PATIENCE = 10.0  # seconds for the names of a rank
MOST = 2**18  # actions of all ranks: more take too long to explain


class Named(NamedTuple):
    """An action as an annotation names it.

    Attributes:
        kind, stage, microbatch: None where the name does not say it.
        partner: whether it is one of a pair.
    """

    kind: Kind | None
    stage: int | None = None
    microbatch: int | None = None
    partner: Named | None = None

    def action(self, kind: Kind) -> Action:
        """The action, of this kind if the name does not say it, and of the first stage and microbatch."""
        return Action(self.kind or kind, self.stage or 0, self.microbatch or 0)


class Names:
    """Reads names of ranges: those of `pattern`, a regular expression with the groups kind, stage and microbatch, each
    of them optional; or those that engines are known to write. Raises UsageError for a pattern that cannot work.

    Attributes:
        is_own: whether a pattern was given.
    """

    def __init__(self, pattern: str | None = None) -> None:
        try:
            self._patterns = [re.compile(each) for each in ([pattern] if pattern else KNOWN)]
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"--names {(pattern or '')[:80]!r} is not a regular expression: {error}") from None
        self.is_own = pattern is not None
        if pattern and not {"kind", "stage", "microbatch"} & set(self._patterns[0].groupindex):
            raise UsageError(
                f"--names {pattern!r} has none of the groups (?P<kind>...), (?P<stage>...), (?P<microbatch>...)"
            )

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """Context manager in which a pattern that was given may take 10 seconds, if this is the main thread: Python's
        signals interrupt no other. Raises UsageError after that.
        """
        if not self.is_own or current_thread() is not main_thread():
            yield
            return

        def stop(*_: object) -> None:
            raise UsageError(f"--names {self._patterns[0].pattern!r} takes too long: it may match in too many ways")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def read(self, name: str) -> list[Named]:
        """The actions of a range: one, the two of a pair, or none."""
        if not self.is_own and name.startswith("PP:"):
            return [*_of_torch(name[3:])]
        for pattern in self._patterns:
            if match := (pattern.search if self.is_own else pattern.fullmatch)(name):
                given = match.groupdict()
                word = given.get("kind")
                kind = KINDS.get(word.lower()) if word else None
                if kind is not None or not word:
                    return [Named(kind, _number(given.get("stage")), _number(given.get("microbatch")))]
        return []


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _of_torch(text: str) -> Iterator[Named]:
    """The actions of an entry of torch's table; none for its communication."""
    try:
        entry = parse_entry(text)
    except UsageError:
        return
    actions = (each for each in actions_of(entry) if not DATAFLOW[each.kind].joint)
    named = [Named(each.kind, each.stage, each.microbatch) for each in actions]
    if isinstance(entry, Pair):
        named = [each._replace(partner=other) for each, other in zip(named, reversed(named), strict=True)]
    yield from named


STEP = "ProfilerStep#"  # beginning of the annotation of a step by torch's profiler
UPDATE = "Optimizer.step"  # beginning of the annotation of an optimizer's step
BETWEEN_STEPS = ("Optimizer.", STEP)  # beginnings of annotations of torch that belong to no action

# Theory of operation
#
# An annotation of an engine lasts longer than its action, since it also waits for what the action needs. So the time of
# an action is taken from what the profiler saw inside of the annotation: kernels that were launched there, or else
# operators of the host that have a backward, and nodes of autograd's graph. Where an engine writes no annotations, the
# same operators show the actions: each has autograd's number, which its backward has too.


@dataclass(slots=True)
class RecordedAction:
    """An action and when it computed.

    Attributes:
        kind: its kind.
        named: what its name says; a stage or microbatch that it does not say is None until it is found otherwise.
        start, end: seconds on the clock of the rank's machine.
        step: the step of the profiler in which its annotation or its first operator began; None where none is marked.
        update: the number of an optimizer's steps that the rank had begun before.
        index: the number of its forward among those of its rank, where operators show it; else None.
        is_named: whether an annotation shows it, and not operators alone.
    """

    kind: Kind
    named: Named
    start: float
    end: float
    step: int | None = None
    update: int = 0
    index: int | None = None
    is_named: bool = True

    @property
    def action(self) -> Action:
        """The action, whose stage and microbatch are known."""
        return self.named.action(self.kind)


def recorded_actions(events: RankEvents, names: Names) -> list[RecordedAction]:
    """The actions of a rank in the order of their starts: those of annotated ranges or, where these name no backward
    that ran, of operators whose backward was recorded. Raises UsageError where a pattern was given that does so.
    """
    events.operators.sort(key=attrgetter("start"))
    events.backwards[:] = _outermost(events.backwards)
    events.kernels.sort(key=lambda each: each[0])
    inside = _Inside(events)
    with names.in_time():
        read = {event.name: names.read(event.name) for event in events.ranges}
    ranges = _outermost([event for event in events.ranges if read[event.name]])
    found = [*islice((each for event in ranges for each in inside.actions(event, read[event.name])), MOST + 1)]
    if all(each.kind is Kind.F for each in found) and (events.backwards or not found):
        if found and names.is_own:
            raise UsageError(f"{events.source}: --names finds no backward, although some ran: let it find these, too")
        found = [] if names.is_own else [*islice(inside.unannotated(), MOST + 1)]
    found.sort(key=attrgetter("start"))
    if any(each.named.microbatch is None and each.index is None for each in found):
        inside.find_forwards(found)
    return found


def _outermost(events: Sequence[Event]) -> list[Event]:
    """The events in the order of their starts, without those inside of others, such as a backward inside of a node
    that computes its forward again, or an action that is named twice.
    """
    found: list[Event] = []
    for each in sorted(events, key=lambda each: (each.start, -each.end)):
        if not found or each.end > found[-1].end or each.start >= found[-1].end:
            found.append(each)
    return found


def marked_steps(events: RankEvents) -> dict[int, Event]:
    """The steps that torch's profiler marks, by their numbers."""
    marks = ((each.name.removeprefix(STEP), each) for each in events.ranges if each.name.startswith(STEP))
    return {int(text): each for text, each in marks if text.isdecimal() and len(text) < 10}


class _Inside:
    """Looks up what ran inside of a range."""

    def __init__(self, events: RankEvents) -> None:
        self._events = events
        self._has_parts = bool(events.kernels or events.operators or events.backwards)
        self._marks = sorted((each.start, number) for number, each in marked_steps(events).items())
        self._updates = sorted(each.start for each in events.ranges if each.name.startswith(UPDATE))
        self._runs = forward_runs(events)
        self._forwards = [each for run in self._runs for each in run] or events.operators

    def actions(self, event: Event, named: Sequence[Named]) -> Iterator[RecordedAction]:
        for each in named:
            kind = each.kind or self._kind(event)
            parts = self._kernels(event, kind, each) or self._on_host(event, kind)
            if parts:
                start, end = _extent(parts)
            else:  # it only waited, as the first stage does for a gradient that nothing before it needs
                start, end = (event.end if self._has_parts else event.start), event.end
            place = bisect_right(self._marks, (event.start, sys.maxsize))
            step, update = self._marks[place - 1][1] if place else None, bisect_right(self._updates, event.start)
            yield RecordedAction(kind, each, start, end, step, update)

    def _kind(self, event: Event) -> Kind:
        """The kind of an action whose name does not say it: a backward is where nodes of autograd's graph ran."""
        if not self._events.backwards:
            raise UsageError(
                f"{self._events.source}: {event.name!r} does not say whether it is a forward or a backward, and no "
                "operator shows it: give --names with the group kind"
            )
        return Kind.B if self._on_host(event, Kind.B) else Kind.F

    def _on_host(self, event: Event, kind: Kind) -> list[Event]:
        """The operators of a forward, or nodes of a backward, whose middle is inside of a range."""
        events = self._forwards if kind is Kind.F else self._events.backwards
        first, last = (bisect_left(events, time, key=_middle) for time in (event.start, event.end))
        return events[first:last]

    def _kernels(self, event: Event, kind: Kind, named: Named) -> list[Event]:
        """The kernels that were launched inside of a range; of a pair, before or after its backward began."""
        first, last = event.start, event.end
        if named.partner is not None and (backwards := self._on_host(event, Kind.B)):
            first, last = (first, backwards[0].start) if kind is Kind.F else (backwards[0].start, last)
        kernels = self._events.kernels
        places = slice(*(bisect_left(kernels, time, key=itemgetter(0)) for time in (first, last)))
        return [kernel for _, kernel in kernels[places]]

    def find_forwards(self, actions: Sequence[RecordedAction]) -> None:
        """Finds the forward of each backward by autograd's numbers, where names do not say the microbatches: of all of
        them, or else of none.
        """
        forwards = [each for each in actions if each.kind is Kind.F]
        owner = {  # what makes no node has the number of the next operator that does, so the last one is the owner
            part.number: index
            for index, each in enumerate(forwards)
            for part in self._on_host(Event("", each.start, each.end), Kind.F)
        }
        found = {id(each): index for index, each in enumerate(forwards)}
        taken: set[tuple[Kind, int]] = set()
        for each in actions:
            if each.kind is not Kind.F:
                parts = self._on_host(Event("", each.start, each.end), Kind.B)
                indices = Counter(owner[part.number] for part in parts if part.number in owner).most_common(1)
                if not indices or (each.kind, indices[0][0]) in taken:
                    return
                found[id(each)] = indices[0][0]
                taken.add((each.kind, indices[0][0]))
        for each in actions:
            each.index = found[id(each)]

    def unannotated(self) -> Iterator[RecordedAction]:
        """The actions that operators show: runs of operators, and the backwards that have the same numbers. A backward
        that comes to the same nodes twice is one in halves. A run whose backwards share no node is that of several
        stages.
        """
        passes, index = self._passes(), 0
        for place, run in enumerate(self._runs):
            alike = list[list[list[Event]]]()  # backwards of the same stage
            for each in passes.get(place, []):
                same = next((found for found in alike if _numbers(found[0]) & _numbers(each)), None)
                alike.append([each]) if same is None else same.append(each)
            alike.sort(key=lambda found: min(_numbers(found[0])))
            firsts = [min(_numbers(found[0])) for found in alike][1:]
            for part, found in zip(_split(run, firsts), alike or [[]], strict=True):
                kinds = [Kind.B] if len(found) == 1 else [Kind.I] + [Kind.W] * (len(found) - 1)
                for kind, own in ((Kind.F, part), *zip(kinds, found, strict=False)):
                    for action in self.actions(Event("", *_extent(own)), [Named(kind)]):
                        action.index, action.is_named = index, False
                        yield action
                index += 1

    def _passes(self) -> dict[int, list[list[Event]]]:
        """The nodes of each backward, by the run of its forward. A backward ends where another forward or backward
        begins, and before a node that it had already.
        """
        owner = {each.number: place for place, run in enumerate(self._runs) for each in run}
        starts = [run[0].start for run in self._runs]
        found: dict[int, list[list[Event]]] = defaultdict(list)
        last: tuple[int, int] | None = None
        seen: set[int | None] = set()
        for each in self._events.backwards:
            if each.number in owner:
                turn = owner[each.number], bisect_right(starts, each.start)
                if turn != last or each.number in seen:
                    found[turn[0]].append([])
                    seen = set()
                seen.add(each.number)
                last = turn
            if last is not None:  # what has no operator, as sums into gradients, belongs to the one before
                found[last[0]][-1].append(each)
        return found


def _numbers(events: Sequence[Event]) -> set[int]:
    return {each.number for each in events if each.number is not None}


def _split(run: Sequence[Event], firsts: Sequence[int]) -> list[list[Event]]:
    """The operators of a run, divided before these numbers."""
    parts: list[list[Event]] = [[] for _ in range(len(firsts) + 1)]
    for each in run:
        parts[bisect_right(firsts, each.number or 0)].append(each)
    return parts


def _middle(event: Event) -> float:
    return (event.start + event.end) / 2


def _extent(events: Sequence[Event]) -> tuple[float, float]:
    return min(each.start for each in events), max(each.end for each in events)


def forward_runs(events: RankEvents) -> list[list[Event]]:
    """The operators of each forward: those between two sends, receives, backwards or steps of an optimizer, if one of
    them has a backward. Operators inside of a backward compute a forward again, and are none. What makes nothing for a
    backward has the number of the next operator that does, so a run all of whose numbers come again is none.
    """
    numbers = {each.number for each in events.backwards}
    ends = [each.end for each in events.ranges if each.name.startswith(BETWEEN_STEPS)]
    borders = sorted([*ends, *(each.start for each in (*events.transfers, *events.backwards))])
    until = [*accumulate((each.end for each in events.backwards), max)]  # the end of the backwards begun so far
    starts = [each.start for each in events.backwards]

    def is_again(operator: Event) -> bool:
        begun = bisect_right(starts, _middle(operator))
        return begun > 0 and _middle(operator) < until[begun - 1]

    first = filterfalse(is_again, events.operators)
    runs = [list(run) for _, run in groupby(first, key=lambda each: bisect_right(borders, each.start))]
    last_with = {each.number: place for place, run in enumerate(runs) for each in run}
    return [
        _begun(run)
        for place, run in enumerate(runs)
        if any(each.number in numbers and last_with[each.number] == place for each in run)
    ]


def _begun(run: list[Event]) -> list[Event]:
    """A run from where it goes on after a wait: what is before, makes nothing for a backward and takes less time than
    the wait, is of what ran before.
    """
    first, busy = 0, 0.0
    for place, (each, later) in enumerate(pairwise(run)):
        if each.number != later.number:
            break
        busy += each.end - each.start
        if later.start - each.end > busy:
            first = place + 1
    return run[first:]
