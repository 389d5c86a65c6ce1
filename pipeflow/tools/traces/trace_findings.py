"""Findings: why each rank stood still, and what stands out in a recorded step, such as a slow stage, a slow link, a
rank that falls behind or a host that is late. Must not contain: how a step is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import NamedTuple

from pipeflow.core.analysis.idle_time import LATE, SHORTEST, Cause, Usual, arrivals, causes, chain, transfer_times
from pipeflow.core.analysis.measured_step import measured_factors
from pipeflow.core.dataflow import Stream
from pipeflow.core.factors import table_of
from pipeflow.core.text import listed
from pipeflow.core.timeline import Span, Timeline
from pipeflow.tools.traces.rebuild import Hosts, Outside

SLOW_STAGE = 1.15  # times the median stage


def _slow_stages_of(timeline: Timeline, usual: Usual) -> dict[int, tuple[float, float]]:
    """The stages that are much slower than the median one: the seconds by which each exceeds it in the whole step, and
    its time as a multiple of the median stage's.
    """
    work: dict[int, float] = defaultdict(float)
    for row in timeline.on(Stream.COMPUTE):
        for span in row:
            work[span.action.stage] += usual.of(span.action)
    middle = median(work.values()) if work else 0.0
    return {
        stage: (seconds - middle, seconds / middle)
        for stage, seconds in work.items()
        if seconds > SLOW_STAGE * middle > 0
    }


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
        self._slow_stages = _slow_stages_of(timeline, self._usual)
        rows = causes(timeline)
        self._transfers = transfer_times(timeline)
        self._arrivals = {id(each.span): each for each in arrivals(timeline)}
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
        _, ratio = self._slow_stages.get(span.action.stage, (0.0, 1.0))
        return "slow stage", (span.end - span.start) * (1 - 1 / ratio)


SLOW_LINK = 2.0  # times the median time of other links
LEAST = 0.02  # of the step: less is not worth a line
SMALL = 0.2  # of the most expensive finding: less may be noise
MAINLY = 0.8  # of what the late actions of a rank lose
ALIKE = 1.15  # times the factor of another stage


class Finding(NamedTuple):
    """Something that makes the step longer.

    Attributes:
        kind: "slow stage", "slow rank", "slow link", "slow microbatch", "slow action", "straggler", "host stall" or
            "outside" of the step's actions; of a job without a pipeline, a part of its step or "last rank".
        where: the stage, the link as (from, to), the microbatch, or the rank.
        seconds: the time that it costs on its rank or link in the step, or the microbatch on all ranks; of "slow
            action", "straggler" and "host stall", the time beyond what other ranks lose in this way.
        text: the finding in words.
    """

    kind: str
    where: int | tuple[int, int]
    seconds: float
    text: str


def what_stands_out(
    timeline: Timeline, idle: Sequence[Idle], outside: Sequence[Outside], hosts: Hosts | None = None
) -> list[Finding]:
    """The causes of lost time, the most expensive first. Those that cost less than 2 % of the step are left out, and
    those that cost less than a fifth of the most expensive one.
    """
    usual = Usual(timeline)
    found = [
        *_stragglers(timeline, usual),
        *_slow_stages(timeline, usual),
        *_slow_links(timeline, idle),
        *_host_stalls(idle, len(timeline.rows), hosts),
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
    slow = _slow_stages_of(timeline, usual)
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
    """Microbatches that take much longer than others on several ranks or, as forward and backward both show, on one
    stage alone; and ranks some of whose other actions take much longer than the same actions of the stage usually do.
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
    factors = table_of(measured_factors(timeline), timeline.placement.num_stages) if any(lost) else ()
    for rank, seconds in _beyond_others(lost):
        own = [span for span in late if span.rank == rank]
        worst = max(own, key=late.__getitem__).action
        one = [span for span in own if (span.action.stage, span.action.microbatch) == (worst.stage, worst.microbatch)]
        extra = sum(late[span] for span in one)
        taken = sum(span.end - span.start for span in one)
        mainly = taken > extra > MAINLY * sum(late[span] for span in own)
        slow = {stage: row[worst.microbatch] for stage, row in enumerate(factors) if row[worst.microbatch] > 1}
        if mainly and [*slow] == [worst.stage]:
            factor = slow[worst.stage]
            text = f"microbatch {worst.microbatch} takes {factor:.2f} times as long as others"
            where = f"on stage {worst.stage} alone (rank {rank})"
            yield Finding("slow microbatch", worst.microbatch, min(seconds, extra), f"{text}, {where}")
        elif mainly:
            what, takes = listed([str(span.action) for span in one]), "takes" if len(one) == 1 else "take"
            text = (
                f"{what} on rank {rank} {takes} {taken / (taken - extra):.2f} times as long as for other microbatches"
            )
            yield Finding("slow action", rank, min(seconds, extra), text)
        else:
            text = f"rank {rank} is late in {len(own)} of {len(timeline.rows[rank])} actions, most in {worst}"
            yield Finding("straggler", rank, seconds, text)


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
    transfers = transfer_times(timeline)
    for link, times in waits.items():
        others = [time for other, time in transfers.items() if other != link]
        usual = max(median(others or [0.0]), SHORTEST * timeline.makespan)
        if transfers.get(link, 0.0) > SLOW_LINK * usual:
            text = f"values from rank {link[0]} to rank {link[1]} arrive late: {len(times)} waits"
            yield Finding("slow link", link, sum(times) - usual * len(times), text)


def _host_stalls(idle: Sequence[Idle], ranks: int, hosts: Hosts | None) -> Iterator[Finding]:
    """Ranks that stood still although nothing was missing, with what their hosts did then."""
    stalls: dict[int, list[Idle]] = defaultdict(list)
    for each in idle:
        if each.kind == "host":
            stalls[each.rank].append(each)
    lost = [sum(each.end - each.start for each in stalls[rank]) for rank in range(ranks)]
    for rank, seconds in _beyond_others(lost):
        times = stalls[rank]
        longest = max(times, key=lambda each: each.end - each.start)
        often = "once" if len(times) == 1 else f"{len(times)} times"
        text = f"rank {rank} stood still {often} although nothing was missing, longest where {longest.cause}"
        yield Finding("host stall", rank, seconds, f"{text}{_done_meanwhile(times, hosts)}")


def _done_meanwhile(times: Sequence[Idle], hosts: Hosts | None) -> str:
    """What the host of a rank did in its pauses, in words."""
    if hosts is None:
        return ""
    whole, named = sum(each.end - each.start for each in times), defaultdict[str, float](float)
    for each in times:
        for name, seconds in hosts.named(each.rank, each.start, each.end).items():
            named[name] += seconds
    told = [name for name, seconds in sorted(named.items(), key=lambda item: -item[1]) if seconds > SMALL * whole]
    if told:
        return f"; of it, {listed([f'{name} takes {named[name] / whole:.0%}' for name in told])}"
    if sum(named.values()) < SMALL * whole:
        return (
            "; no operator runs then, and nothing names what the host does, such as garbage collection: use "
            "torch.profiler.record_function"
        )
    return ""
