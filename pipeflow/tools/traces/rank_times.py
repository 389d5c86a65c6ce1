"""Times of ranks: the parts that a step consists of on each rank of a job without a pipeline, such as FSDP, DDP, tensor
parallel or a single device. Must not contain: formats of files, and what stands out.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.tools.traces.action_names import STEP, UPDATE, marked_steps
from pipeflow.tools.traces.events import Event, Exchange, RankEvents

COLLECTIVES = {  # what their names have in them, without underscores
    "reduce-scatter": "reducescatter",
    "all-gather": "allgather",
    "all-reduce": "allreduce",
    "all-to-all": "alltoall|(?:intra|inter)node(?:ll)?::",  # the latter of DeepEP
    "broadcast": "broadcast",
    "send/receive": "send|recv",
}
OTHER = "other"
TOGETHER = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")  # those that no rank ends before all began
LOADER = "enumerate(DataLoader)"  # beginning of the annotation of a data loader by torch
PARTS = (
    *("computes", "optimizer", "data loading", *COLLECTIVES, OTHER),
    *("waiting", "copies", "launch", "host", "pauses", "idle"),
)
SHORT = 2e-4  # seconds: shorter pauses of a device are those between one launch of the host and the next
EXACT = 1e-6  # share of a step by which its parts may miss its length
AT_ONCE, MOMENT = 0.1, 5e-5  # how far apart ranks end one collective: share of its time, and seconds

# Theory of operation
#
# A step is divided into disjoint parts. Each moment belongs to the first of these that holds: something computes; ranks
# exchange tensors; memory is copied; something is launched and has not begun; and last, what the host does meanwhile,
# as annotations name it. Where a device was recorded, the moments are those of the device; otherwise they are those of
# operators on the host. A collective ends on all ranks at once, so it takes least time on the rank that comes last.
# What it takes longer on another rank, that one waited. This needs no common clock.

Window = tuple[float, float]  # start and end, in seconds on the clock of a rank's machine


class Piece(NamedTuple):
    """A time of one part.

    Attributes:
        start, end: seconds on the clock of the rank's machine.
        kind: one of PARTS.
        cause: what the host does meanwhile, or the rank that is waited for; "" if nothing says it.
    """

    start: float
    end: float
    kind: str
    cause: str = ""


class Communication(NamedTuple):
    """The exchanges of one kind on a rank in a step.

    Attributes:
        kind: such as "all-gather".
        calls: their number.
        seconds: the time in which at least one of them runs.
        hidden: the seconds of it in which something computes, too.
    """

    kind: str
    calls: int
    seconds: float
    hidden: float


@dataclass(frozen=True)
class RankTimes:
    """The time of a rank in a step.

    Attributes:
        rank: its number.
        on_device: whether it is the time of a device, or of operators on the host.
        seconds: the length of the step on this rank.
        parts: the seconds of each part, by (kind, cause), which sum up to the step.
        communications: what it exchanged with other ranks.
        pieces: the number of times that each kind of part has.
    """

    rank: int
    on_device: bool
    seconds: float
    parts: dict[tuple[str, str], float]
    communications: tuple[Communication, ...]
    pieces: dict[str, int]

    def part(self, kind: str) -> float:
        """The seconds of all parts of a kind."""
        return sum(seconds for (each, _), seconds in self.parts.items() if each == kind)


def kind_of(name: str) -> str:
    """The kind of collective that a name says."""
    plain = name.lower().replace("_", "")
    return next((kind for kind, pattern in COLLECTIVES.items() if re.search(pattern, plain)), OTHER)


def exchanges_of(events: RankEvents) -> list[tuple[str, Exchange]]:
    """What a rank exchanged with others, each with its kind: on a device, or else on the host."""
    calls = sorted(events.collectives, key=attrgetter("start"))
    if not events.kernels and not events.exchanges:
        runs = sorted((each for each in events.started if not each.name.startswith("nccl")), key=attrgetter("start"))
        names = calls if len(calls) == len(runs) else runs  # gloo reduces and scatters by reducing everywhere
        return [(kind_of(call.name), Exchange(run, run.start)) for call, run in zip(names, runs, strict=True)]
    hosts = sorted([*events.started, *calls, *events.transfers], key=attrgetter("start"))
    starts = [each.start for each in hosts]
    is_together = hosts and all(kind_of(each.name) != "send/receive" for each in hosts)

    def kind(each: Exchange) -> str:
        if (called := kind_of(each.called)) != OTHER:
            return called
        if (found := kind_of(each.event.name)) not in ("send/receive", OTHER):
            return found
        place = bisect_right(starts, each.launched)  # NCCL names kernels of several collectives after sends
        around = (host for host in hosts[max(place - 3, 0) : place][::-1] if each.launched <= host.end)
        return next((kind_of(host.name) for host in around), OTHER if is_together else found)

    return [(kind(each), each) for each in events.exchanges]


def sends(events: RankEvents) -> bool:
    """Whether a rank sends to a single other one, or receives from it."""
    return bool(events.transfers) or any(kind == "send/receive" for kind, _ in exchanges_of(events))


def computes(events: RankEvents) -> bool:
    """Whether something is there that a device or the host worked on."""
    return bool(events.kernels or events.exchanges or events.work)


def steps_of_job(ranks: Sequence[RankEvents]) -> tuple[str, list[list[Window]]]:
    """The steps that all ranks recorded, each with its time on each rank: from one "mark" of torch's profiler to the
    next one; where it marks none, from the end of one "update" by the optimizer to the next one; or else one, which is
    the "recording".
    """
    marks = [marked_steps(each) for each in ranks]
    if common := sorted(set(marks[0]).intersection(*marks)):
        return ("mark", [[_marked(own, number) for own in marks] for number in common])
    ends = [_updates(each) for each in ranks]
    if len(ends[0]) > 1 and len({*map(len, ends)}) == 1:
        return ("update", [[(own[at], own[at + 1]) for own in ends] for at in range(len(ends[0]) - 1)])
    return ("recording", [[_extent(each) for each in ranks]])


def _marked(marks: dict[int, Event], number: int) -> Window:
    last = marks[number].end
    return marks[number].start, marks[number + 1].start if number + 1 in marks else last


def _updates(events: RankEvents) -> list[float]:
    """When the steps of the optimizer end, of several optimizers those of the first one."""
    found = sorted((each for each in events.ranges if each.name.startswith(UPDATE)), key=attrgetter("start"))
    return [each.end for each in found if each.name == found[0].name]


def _extent(events: RankEvents) -> Window:
    device = [event for _, event in (*events.kernels, *events.copies)] + [each.event for each in events.exchanges]
    found = [*device, *events.work, *events.annotations, *events.started]
    return min(each.start for each in found), max(each.end for each in found)


class Wait(NamedTuple):
    """How long a rank waited in a collective, in seconds, and for which one."""

    seconds: float
    last: int


Sent = Sequence[tuple[str, Exchange]]  # of a rank


def waits_of(ranks: Sequence[RankEvents], sent: Sequence[Sent], windows: Sequence[Window]) -> list[dict[int, Wait]]:
    """Per rank, how long it waited in collectives that begin in a step, by their places in `sent`. Collectives of a
    group are matched in their order, if all ranks have equally many. Where no file says who takes part in them, those
    of all ranks must end at once.
    """
    found: list[dict[int, Wait]] = [{} for _ in ranks]
    order: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, (own, (start, end)) in enumerate(zip(sent, windows, strict=True)):
        for index in sorted(range(len(own)), key=lambda index: own[index][1].launched):
            kind, each = own[index]
            if kind in TOGETHER and start <= each.launched < end:
                order[each.group or ranks[place].group, kind][place].append(index)
    is_whole = len(ranks) == (ranks[0].ranks or 0)
    for (group, _), places in order.items():
        if len(places) < 2 or len({*map(len, places.values())}) > 1:
            continue
        rounds = [dict(zip(places, turn, strict=True)) for turn in zip(*places.values(), strict=True)]
        events = [{place: sent[place][index][1].event for place, index in turn.items()} for turn in rounds]
        if not group and not (
            is_whole and len(places) == len(ranks) and all(_end_at_once(each.values()) for each in events)
        ):
            continue
        for turn, ran in zip(rounds, events, strict=True):
            last = min(ran, key=lambda place: ran[place].end - ran[place].start)
            least = ran[last].end - ran[last].start
            for place, index in turn.items():
                found[place][index] = Wait(ran[place].end - ran[place].start - least, last)
    return found


def _end_at_once(events: Iterable[Event]) -> bool:
    ends = [each.end for each in events]
    longest = max(each.end - each.start for each in events)
    return max(ends) - min(ends) <= AT_ONCE * longest + MOMENT


def times_of(events: RankEvents, sent: Sent, waits: dict[int, Wait], window: Window, ranks: Sequence[int]) -> RankTimes:
    """Divides a step of a rank. Raises UsageError if the parts do not sum up to the step."""
    start, end = window
    on_device = bool(events.kernels or events.exchanges)
    inside = ((LOADER, "data loading"), (UPDATE, "optimizer"))
    known = _disjoint(
        Piece(each.start, each.end, kind)
        for beginning, kind in inside
        for each in events.ranges
        if each.name.startswith(beginning)
    )
    begins = [each.start for each in known]

    def kind_at(moment: float) -> str:
        place = bisect_right(begins, moment) - 1
        return known[place].kind if place >= 0 and moment < known[place].end else "computes"

    copies = {*events.copies} if on_device else set()
    if on_device:
        kernels = ((launched, event) for launched, event in events.kernels if (launched, event) not in copies)
        work = [
            Piece(event.start, event.end, kind_at(launched) if launched < event.start else "computes")
            for launched, event in kernels
        ]
    else:
        work = [Piece(each.start, each.end, kind_at(each.start)) for each in events.work]
    exchanged = list[Piece]()
    for index, (kind, each) in enumerate(sent):
        wait = waits.get(index, Wait(0.0, 0))
        begun = each.event.start + wait.seconds
        exchanged.append(Piece(each.event.start, begun, "waiting", f"rank {ranks[wait.last]}"))
        exchanged.append(Piece(begun, each.event.end, kind))
    device = [*events.kernels, *copies, *((each.launched, each.event) for _, each in sent)]
    layers = [
        work,
        exchanged,
        [Piece(event.start, event.end, "copies") for _, event in copies],
        [Piece(launched, event.start, "launch") for launched, event in device if launched < event.start],
        known,
    ]
    found, free = list[Piece](), [(start, end)]
    for layer in layers:
        pieces, free = _taken(free, _disjoint(each for each in layer if each.start < end and each.end > start))
        found += pieces
    is_known = not on_device or any(launched < event.start for launched, event in device)
    found += (
        _idle(free, _innermost(events, start, end, on_device=on_device))
        if is_known
        else [Piece(*each, "idle") for each in free]
    )
    parts, pauses = defaultdict[tuple[str, str], float](float), defaultdict[str, int](int)
    for piece in found:
        parts[piece.kind, piece.cause] += piece.end - piece.start
        pauses[piece.kind] += 1
    if abs(math.fsum(parts.values()) - (end - start)) > EXACT * (end - start) or min(parts.values()) < 0:
        raise UsageError(f"{events.source}: the parts of a step do not add up to it: its events have wrong times")
    communications = tuple(_communications(sent, _disjoint(work), window))
    return RankTimes(events.rank or 0, on_device, end - start, dict(parts), communications, dict(pauses))


def _communications(sent: Sent, work: list[Piece], window: Window) -> Iterator[Communication]:
    for kind in dict.fromkeys(kind for kind, _ in sent):
        own = [Piece(each.event.start, each.event.end, kind) for other, each in sent if other == kind]
        calls = sum(window[0] <= each.start < window[1] for each in own)
        during, _ = _taken([window], _disjoint(own))
        hidden, _ = _taken([(each.start, each.end) for each in during], work)
        if during:
            yield Communication(kind, calls, _length(during), _length(hidden))


def _length(pieces: Iterable[Piece]) -> float:
    return math.fsum(each.end - each.start for each in pieces)


def _disjoint(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of which each begins where those before have ended."""
    found, reach = list[Piece](), -math.inf
    for each in sorted(pieces):
        if each.end > reach:
            found.append(each._replace(start=max(each.start, reach)))
            reach = each.end
    return [each for each in found if each.end > each.start]


def _taken(free: Sequence[Window], pieces: Sequence[Piece]) -> tuple[list[Piece], list[Window]]:
    """What disjoint pieces take of times that are free, and what is left of these."""
    taken, left = list[Piece](), list[Window]()
    place = 0
    for start, end in free:
        while place < len(pieces) and pieces[place].end <= start:
            place += 1
        at = place
        while start < end and at < len(pieces) and pieces[at].start < end:
            first, last = max(pieces[at].start, start), min(pieces[at].end, end)
            if first > start:
                left.append((start, first))
            if last > first:
                taken.append(pieces[at]._replace(start=first, end=last))
            start = max(start, last)
            at += 1
        if start < end:
            left.append((start, end))
    return taken, left


def _innermost(events: RankEvents, start: float, end: float, *, on_device: bool) -> list[Piece]:
    """What the host does in a step, at each moment what began last: annotations, calls that wait, and of a device's
    host, long operators.
    """
    found, begun, moment = list[Piece](), list[Event](), start

    def until(time: float) -> None:
        nonlocal moment
        if begun and time > moment:
            found.append(Piece(moment, time, "pauses", begun[-1].name.partition("#")[0]))
        moment = max(moment, time)

    some = [*events.annotations, *events.collectives, *events.calls]
    some += [each for each in events.work if on_device and each.end - each.start >= SHORT]
    named = (each for each in some if each.end > start and each.start < end)
    for each in sorted(named, key=lambda each: (each.start, -each.end)):
        if not each.name.startswith((STEP, "nccl", "gloo:")):
            while begun and begun[-1].end <= each.start:
                until(begun[-1].end)
                begun.pop()
            until(each.start)
            begun.append(each)
    while begun:
        until(begun[-1].end)
        begun.pop()
    return found


def _idle(free: Sequence[Window], named: Sequence[Piece]) -> Iterator[Piece]:
    """The times in which nothing runs: short ones between launches, and pauses, by what the host does then."""
    yield from (Piece(*each, "host") for each in free if each[1] - each[0] < SHORT)
    taken, left = _taken([each for each in free if each[1] - each[0] >= SHORT], named)
    yield from taken
    yield from (Piece(*each, "pauses") for each in left)
