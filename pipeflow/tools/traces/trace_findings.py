"""Findings: why each rank stood still, and what stands out in a recorded step, such as a slow stage, a slow link, a
rank that falls behind or a host that is late. Must not contain: how a step is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from statistics import fmean, median
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import LATE, Cause, causes, chain, lower_quartile
from pipeflow.core.dataflow import Key, Stream, Value, makers, needs
from pipeflow.core.timeline import Span, Timeline
from pipeflow.tools.traces.rebuild import Outside

SLOW_STAGE = 1.15  # times the median stage
LATE_ACTION = 1.5  # times the usual time of the action's kind and stage


class Usual:
    """The usual times of a step.

    Args:
        timeline: the step.

    Attributes:
        slow_stages: the stages that are much slower than the median one: the seconds by which each exceeds it in the
            whole step, and its time as a multiple of the median stage's.
    """

    def __init__(self, timeline: Timeline) -> None:
        times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for row in timeline.on(Stream.COMPUTE):
            for span in row:
                times[span.action.kind, span.action.stage].append(span.end - span.start)
        self._times = {key: lower_quartile(found) for key, found in times.items()}
        work: dict[int, float] = defaultdict(float)
        for (kind, stage), found in times.items():
            work[stage] += self._times[kind, stage] * len(found)
        middle = median(work.values()) if work else 0.0
        self.slow_stages = {
            stage: (seconds - middle, seconds / middle)
            for stage, seconds in work.items()
            if seconds > SLOW_STAGE * middle > 0
        }

    def late(self, span: Span) -> float:
        """By how much a span took longer than is usual for its kind and stage; 0 if that is little."""
        usual = self._times[span.action.kind, span.action.stage]
        extra = span.end - span.start - usual
        return extra if extra > (LATE_ACTION - 1) * usual else 0.0


SHORTEST = 1e-3  # shares of the step: shorter pauses are part of the engine's own work
KINDS = ("fill", "waiting", "slow stage", "straggler", "transfer", "host", "drain")


class Idle(NamedTuple):
    """A time in which a rank did not compute.

    Attributes:
        rank: the rank.
        start, end: seconds from the start of the step.
        kind: "fill" and "drain", before the first action of the rank and after the last one; "waiting" for an action of
            another rank to end, of which "slow stage" and "straggler" are the parts that a slow stage or a late action
            add; "transfer" of what that made; "host" where all was there, so that the host or the engine was late.
        cause: the cause in words.
        source: the rank that made what was waited for; None if there is none.
    """

    rank: int
    start: float
    end: float
    kind: str
    cause: str
    source: int | None = None


def idle_times(timeline: Timeline) -> list[Idle]:
    """Every time in which a rank is idle, rank by rank, each with one cause."""
    least = SHORTEST * timeline.makespan
    waits = _Waits(timeline)
    found = (each for rank in range(len(timeline.rows)) for each in waits.of_rank(rank))
    return [each for each in found if each.end - each.start > least]


class _Arrival(NamedTuple):
    """A value of another rank, and the action before which it came last.

    Attributes:
        span, maker, value: the action, the one that made the value, and the value.
        pause: seconds for which the rank stood still before the action.
    """

    span: Span
    maker: Span
    value: Value
    pause: float

    @property
    def delay(self) -> float:
        """The seconds from when the value was made until the action began."""
        return self.span.start - self.maker.end


FEW = 3  # waits for the values of a link: fewer do not show how long they take
STEADY = 1.1  # times the shortest delay: values that take as long were waited for


def _arrivals(timeline: Timeline) -> Iterator[_Arrival]:
    made: dict[Key, Span] = {
        (each.action.kind, each.action.stage, each.action.microbatch): each for row in timeline.rows for each in row
    }
    for row in timeline.on(Stream.COMPUTE):
        for previous, span in zip((None, *row), row, strict=False):
            came = [
                (made[key], value)
                for value in needs(span.action, timeline.placement.num_stages)
                for key in makers(value)
                if key in made and made[key].rank != span.rank
            ]
            if came:
                maker, value = max(came, key=lambda each: each[0].end)
                yield _Arrival(span, maker, value, span.start - (previous.end if previous else 0.0))


def _transfers(timeline: Timeline, arrivals: Sequence[_Arrival]) -> dict[tuple[int, int], float]:
    """Per link, how long its values usually take: the lower quartile of the times for which a rank that was free waited
    for them, without its usual pause. If it rarely waited for them, but a wait or several pauses end with the
    shortest delay of all values of the link, they take that long. Otherwise they take as long as on other links.
    """
    pauses = [
        lower_quartile([b.start - a.end for a, b in pairwise(row)] or [0.0]) for row in timeline.on(Stream.COMPUTE)
    ]
    links: dict[tuple[int, int], list[_Arrival]] = defaultdict(list)
    for each in arrivals:
        links[each.maker.rank, each.span.rank].append(each)
    found, least = dict[tuple[int, int], float](), SHORTEST * timeline.makespan
    for link, own in links.items():
        usual, shortest = pauses[link[1]], min(each.delay for each in own)
        awaited = [each.delay for each in own if each.delay < each.pause]
        steady = [each for each in own if each.pause > usual + least and each.delay <= STEADY * shortest]
        if len(awaited) >= FEW:
            found[link] = max(lower_quartile(awaited) - usual, 0.0)
        elif len(steady) >= FEW or any(each.delay < each.pause for each in steady):
            found[link] = max(shortest - usual, 0.0)
    middle = median(found.values()) if found else 0.0
    return {link: found.get(link, middle) for link in links}


class _Waits:
    """Divides the pauses of ranks by cause."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._usual = timeline, Usual(timeline)
        rows = causes(timeline)
        arrivals = [*_arrivals(timeline)]
        self._transfers = _transfers(timeline, arrivals)
        self._arrivals = {id(each.span): each for each in arrivals}
        self._rows = [[cause for cause in row if cause.span.stream is Stream.COMPUTE] for row in rows]
        self._causes = {id(cause.span): cause for row in rows for cause in row}

    def of_rank(self, rank: int) -> Iterator[Idle]:
        row, makespan = self._rows[rank], self._timeline.makespan
        if not row:
            yield Idle(rank, 0.0, makespan, "drain", f"rank {rank} has nothing to do")
            return
        free = 0.0
        for cause in row:
            yield from self._between(free, cause, is_first=cause is row[0])
            free = cause.span.end
        last = row[-1].span
        yield Idle(rank, last.end, makespan, "drain", f"the pipeline drains: {last.action} is the last action")

    def _between(self, free: float, cause: Cause, *, is_first: bool) -> Iterator[Idle]:
        """The parts of a pause before an action: until what it needs was made, until that usually arrives, and from
        then on.
        """
        span, maker, value, rank = cause.span, cause.after, cause.value, cause.span.rank
        if value is None and id(span) in self._arrivals:
            _, maker, value, _ = self._arrivals[id(span)]
        arrived = free
        if value is not None and maker is not None and maker.rank != rank:
            made = min(max(maker.end, free), span.start)
            usual = maker.end + LATE * self._transfers.get((maker.rank, rank), 0.0)  # the rest, the host held up
            arrived = min(max(made, usual), span.start)
            if is_first:
                yield Idle(rank, free, made, "fill", f"the pipeline fills: {span.action} is the first action")
            else:
                yield from self._waiting(free, made, span, maker)
            came = f"the {value.content} of {maker.action} came from rank {maker.rank}"
            yield Idle(rank, made, arrived, "transfer", came, maker.rank)
        yield Idle(rank, arrived, span.start, "host", f"nothing was missing for {span.action}")

    def _waiting(self, free: float, made: float, span: Span, maker: Span) -> Iterator[Idle]:
        """The parts of a wait: first what any stage would take, then what slow stages and late actions add."""
        words = f"{span.action} waited for {maker.action} on rank {maker.rank}"
        added = {"slow stage": (0.0, maker), "straggler": (0.0, maker)}
        before = (cause.span for cause in chain(maker, lambda span: self._causes[id(span)]))
        for each in takewhile(lambda each: each.end > free, before):
            kind, extra = self._extra(each)
            if extra:
                seconds = each.end - max(each.start, free)
                total, worst = added[kind]
                added[kind] = total + min(extra, seconds), worst if total else each
        left = made - free
        parts = [(kind, min(total, left), worst) for kind, (total, worst) in added.items()]
        start = made - min(left, sum(seconds for _, seconds, _ in parts))
        yield Idle(span.rank, free, start, "waiting", words, maker.rank)
        for kind, seconds, worst in parts:
            end = min(start + seconds, made)
            what = f"stage {worst.action.stage} is slow" if kind == "slow stage" else f"{worst.action} was late"
            yield Idle(span.rank, start, end, kind, f"{words}, and {what} on rank {worst.rank}", maker.rank)
            start = end

    def _extra(self, span: Span) -> tuple[str, float]:
        """The reason why a span took longer than usual, and by how much."""
        if span.stream is not Stream.COMPUTE:
            return "straggler", 0.0
        if late := self._usual.late(span):
            return "straggler", late
        _, ratio = self._usual.slow_stages.get(span.action.stage, (0.0, 1.0))
        return "slow stage", (span.end - span.start) * (1 - 1 / ratio)


SLOW_LINK = 2.0  # times the median time of other links
LEAST = 0.02  # of the step: less is not worth a line
SMALL = 0.2  # of the most expensive finding: less may be noise
ALIKE = 1.15  # times the factor of another stage


class Finding(NamedTuple):
    """Something that makes the step longer.

    Attributes:
        kind: "slow stage", "slow rank", "slow link", "slow microbatch", "straggler", "host stall" or "outside" of the
            step's actions; of a job without a pipeline, a part of its step or "last rank".
        where: the stage, the link as (from, to), the microbatch, or the rank.
        seconds: the time that it costs on its rank or link in the step, or the microbatch on all ranks; of "straggler"
            and "host stall", the time beyond what other ranks lose in this way.
        text: the finding in words.
    """

    kind: str
    where: int | tuple[int, int]
    seconds: float
    text: str


def what_stands_out(timeline: Timeline, idle: Sequence[Idle], outside: Sequence[Outside]) -> list[Finding]:
    """The causes of lost time, the most expensive first. Those that cost less than 2 % of the step are left out, and
    those that cost less than a fifth of the most expensive one.
    """
    usual = Usual(timeline)
    found = [
        *_stragglers(timeline, usual),
        *_slow_stages(timeline, usual),
        *_slow_links(timeline, idle),
        *_host_stalls(idle, len(timeline.rows)),
    ]
    found += map(_outside, outside)
    least = max(LEAST * timeline.makespan, SMALL * max((each.seconds for each in found), default=0.0))
    return sorted((each for each in found if each.seconds > least), key=lambda each: -each.seconds)


def _outside(each: Outside) -> Finding:
    when = "before the first action of" if each.is_before else "after the last action of"
    named = [
        f"{name} takes {seconds / each.seconds:.0%}"
        for name, seconds in each.named.items()
        if seconds > LEAST * each.seconds
    ]
    what = (
        f"of it, {' and '.join(named)}" if named else "nothing names what runs then: use torch.profiler.record_function"
    )
    return Finding("outside", each.rank, each.seconds, f"{when} the step, on rank {each.rank}; {what}")


def _slow_stages(timeline: Timeline, usual: Usual) -> Iterator[Finding]:
    """Stages that take longer than others, and ranks on which all of several stages do by the same factor."""
    slow = dict(usual.slow_stages)
    for rank in range(timeline.placement.num_ranks):
        own = timeline.placement.stages_of(rank)
        ratios = [slow[stage][1] for stage in own if stage in slow]
        if len(own) == len(ratios) > 1 and max(ratios) <= ALIKE * min(ratios):
            seconds = sum(slow.pop(stage)[0] for stage in own)
            text = f"rank {rank} computes {fmean(ratios):.2f} times as long as the median rank, on all of its stages"
            yield Finding("slow rank", rank, seconds, text)
    for stage, (seconds, ratio) in slow.items():
        ranks = " and ".join(map(str, timeline.placement.ranks_of(stage)))
        text = f"stage {stage} (rank {ranks}) computes {ratio:.2f} times as long as the median stage"
        yield Finding("slow stage", stage, seconds, text)


def _stragglers(timeline: Timeline, usual: Usual) -> Iterator[Finding]:
    """Microbatches that take much longer than others on several ranks, and ranks some of whose other actions take much
    longer than the same actions of the stage usually do.
    """
    spans = [span for row in timeline.on(Stream.COMPUTE) for span in row]
    late = {span: extra for span in spans if (extra := usual.late(span))}
    for microbatch in sorted({span.action.microbatch for span in late}):
        whole = [span for span in spans if span.action.microbatch == microbatch]
        own = [span for span in whole if span in late]
        ranks = {span.rank for span in own}
        if len(ranks) > 1 and 2 * len(own) > len(whole):
            seconds = sum(late.pop(span) for span in own)
            taken = sum(span.end - span.start for span in own)
            text = f"microbatch {microbatch} takes {taken / (taken - seconds):.2f} times as long as others"
            yield Finding("slow microbatch", microbatch, seconds, f"{text}, on {len(ranks)} ranks")
    lost = [sum(extra for span, extra in late.items() if span.rank == rank) for rank in range(len(timeline.rows))]
    for rank, seconds in _beyond_others(lost):
        own = [span for span in late if span.rank == rank]
        text = f"rank {rank} is late in {len(own)} of {len(timeline.rows[rank])} actions, most in "
        yield Finding("straggler", rank, seconds, f"{text}{max(own, key=late.__getitem__).action}")


def _beyond_others(lost: Sequence[float]) -> Iterator[tuple[int, float]]:
    """The ranks that lose more time than the median rank, with the difference: what all lose is no one's fault."""
    usual = sorted(lost)[(len(lost) - 1) // 2] if len(lost) > 1 else 0.0
    return ((rank, seconds - usual) for rank, seconds in enumerate(lost) if seconds > usual)


def _slow_links(timeline: Timeline, idle: Sequence[Idle]) -> Iterator[Finding]:
    """Links on which values take much longer than on others."""
    waits: dict[tuple[int, int], list[float]] = defaultdict(list)
    for each in idle:
        if each.kind == "transfer" and each.source is not None:
            waits[each.source, each.rank].append(each.end - each.start)
    transfers = _transfers(timeline, [*_arrivals(timeline)])
    for link, times in waits.items():
        others = [time for other, time in transfers.items() if other != link]
        usual = max(median(others or [0.0]), SHORTEST * timeline.makespan)
        if transfers.get(link, 0.0) > SLOW_LINK * usual:
            text = f"values from rank {link[0]} to rank {link[1]} arrive late: {len(times)} waits"
            yield Finding("slow link", link, sum(times) - usual * len(times), text)


def _host_stalls(idle: Sequence[Idle], ranks: int) -> Iterator[Finding]:
    """Ranks that stood still although nothing was missing."""
    stalls: dict[int, list[Idle]] = defaultdict(list)
    for each in idle:
        if each.kind == "host":
            stalls[each.rank].append(each)
    lost = [sum(each.end - each.start for each in stalls[rank]) for rank in range(ranks)]
    for rank, seconds in _beyond_others(lost):
        times = stalls[rank]
        longest = max(times, key=lambda each: each.end - each.start)
        text = f"rank {rank} stood still {len(times)} times although nothing was missing, longest where {longest.cause}"
        yield Finding("host stall", rank, seconds, text)
