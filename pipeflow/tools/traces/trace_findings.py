"""Findings: why each rank stood still, and what stands out in a recorded step, such as a slow stage, a slow link, a
rank that falls behind or a host that is late. Must not contain: how a step is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import LATE, Cause, causes, chain, lower_quartile, transfer_times
from pipeflow.core.dataflow import Stream
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


class _Waits:
    """Divides the pauses of ranks by cause."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._usual = timeline, Usual(timeline)
        rows = causes(timeline)
        self._rows = [[cause for cause in row if cause.span.stream is Stream.COMPUTE] for row in rows]
        self._transfers = transfer_times(timeline)
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
        span, maker, rank = cause.span, cause.after, cause.span.rank
        arrived = free
        if cause.value is not None and maker is not None and maker.rank != rank:
            made = min(max(maker.end, free), span.start)
            usual = maker.end + LATE * self._transfers.get((maker.rank, rank), 0.0)  # the rest, the host held up
            arrived = min(max(made, usual), span.start)
            if is_first:
                yield Idle(rank, free, made, "fill", f"the pipeline fills: {span.action} is the first action")
            else:
                yield from self._waiting(free, made, span, maker)
            came = f"the {cause.value.content} of {maker.action} came from rank {maker.rank}"
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


SLOW_LINK = 2.0  # times the median wait of other links
LEAST = 0.02  # of the step: less is not worth a line
SMALL = 0.1  # of the most expensive finding: less may be noise
ALIKE = 1.15  # times the factor of another stage


class Finding(NamedTuple):
    """Something that makes the step longer.

    Attributes:
        kind: "slow stage", "slow rank", "slow link", "straggler", "host stall" or "outside" of the step's actions; of a
            job without a pipeline, a part of its step or "last rank".
        where: the stage, the link as (from, to), or the rank.
        seconds: the time that it costs on its rank or link in the step.
        text: the finding in words.
    """

    kind: str
    where: int | tuple[int, int]
    seconds: float
    text: str


def what_stands_out(timeline: Timeline, idle: Sequence[Idle], outside: Sequence[Outside]) -> list[Finding]:
    """The causes of lost time, the most expensive first. Those that cost less than 2 % of the step are left out, and
    those that cost less than a tenth of the most expensive one.
    """
    usual = Usual(timeline)
    found = [*_stragglers(timeline, usual), *_slow_stages(timeline, usual), *_slow_links(idle), *_host_stalls(idle)]
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
    """Ranks some of whose actions take much longer than the same actions of the stage usually do."""
    for rank, row in enumerate(timeline.on(Stream.COMPUTE)):
        late = [(span, extra) for span in row if (extra := usual.late(span))]
        if late:
            worst = max(late, key=lambda each: each[1])[0].action
            text = f"rank {rank} is late in {len(late)} of {len(row)} actions, most in {worst}"
            yield Finding("straggler", rank, sum(extra for _, extra in late), text)


def _slow_links(idle: Sequence[Idle]) -> Iterator[Finding]:
    """Links on which values take much longer than on others."""
    waits: dict[tuple[int, int], list[float]] = defaultdict(list)
    for each in idle:
        if each.kind == "transfer" and each.source is not None:
            waits[each.source, each.rank].append(each.end - each.start)
    for link, times in waits.items():
        others = [time for other, some in waits.items() if other != link for time in some]
        usual = median(others) if others else 0.0
        if median(times) > SLOW_LINK * usual:
            text = f"values from rank {link[0]} to rank {link[1]} arrive late: {len(times)} waits"
            yield Finding("slow link", link, sum(times) - usual * len(times), text)


def _host_stalls(idle: Sequence[Idle]) -> Iterator[Finding]:
    """Ranks that stood still although nothing was missing."""
    stalls: dict[int, list[Idle]] = defaultdict(list)
    for each in idle:
        if each.kind == "host":
            stalls[each.rank].append(each)
    for rank, times in stalls.items():
        longest = max(times, key=lambda each: each.end - each.start)
        text = f"rank {rank} stood still {len(times)} times although nothing was missing, longest where {longest.cause}"
        yield Finding("host stall", rank, sum(each.end - each.start for each in times), text)
