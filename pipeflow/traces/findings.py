"""Findings: what stands out in a recorded step, such as a slow stage, a slow link, a rank that falls behind or a host
that is late. Must not contain: how a step is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from pipeflow.core.dataflow import Stream
from pipeflow.core.timeline import Timeline
from pipeflow.traces.idle import Idle
from pipeflow.traces.usual import Usual

SLOW_LINK = 2.0  # times the median wait of other links
LEAST = 0.02  # of the step: less is not worth a line


class Finding(NamedTuple):
    """Something that makes the step longer.

    Attributes:
        kind: "slow stage", "slow link", "straggler" or "host stall".
        where: the stage, the link as (from, to), or the rank.
        seconds: the time that it costs on its rank or link in the step.
        text: the finding in words.
    """

    kind: str
    where: int | tuple[int, int]
    seconds: float
    text: str


def findings(timeline: Timeline, idle: Sequence[Idle]) -> list[Finding]:
    """The causes of lost time, the most expensive first. Those that cost less than 2 % of the step are left out."""
    usual = Usual(timeline)
    found = [*_stragglers(timeline, usual), *_slow_stages(timeline, usual), *_slow_links(idle), *_host_stalls(idle)]
    least = LEAST * timeline.makespan
    return sorted((each for each in found if each.seconds > least), key=lambda each: -each.seconds)


def _slow_stages(timeline: Timeline, usual: Usual) -> Iterator[Finding]:
    for stage, (seconds, ratio) in usual.slow_stages.items():
        rank = " and ".join(map(str, timeline.placement.ranks_of(stage)))
        text = f"stage {stage} (rank {rank}) computes {ratio:.2f} times as long as the median stage"
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
