"""Timelines to draw."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline
from pipeflow.schedules import make_schedule

HOSTILE = "</script><script>alert(1)</script> & <b>\"'bold'</b> \u2028 ]]> "


@cache
def planned(name: str = "1f1b", ranks: int = 4, microbatches: int = 8, **options: int) -> Timeline:
    return simulate(make_schedule(name, ranks=ranks, microbatches=microbatches, **options))


def with_transfers(name: str = "zb-v", ranks: int = 4, microbatches: int = 6) -> Timeline:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    return simulate(schedule, CostModel.even(schedule.placement, transfer=0.25))


def with_bytes() -> Timeline:
    schedule = make_schedule("zb-h1", ranks=4, microbatches=8)
    return simulate(schedule, CostModel.even(schedule.placement, saved_bytes=3 * 2**30, deferred_bytes=2**30))


def reducing(name: str = "interleaved-1f1b", reduce: float = 8, **options: int) -> Timeline:
    """With gradient reductions: some beside computations, some after all of them."""
    schedule = make_schedule(name, ranks=4, microbatches=8, **options).with_reductions()
    return simulate(schedule, CostModel.even(schedule.placement, reduce=reduce))


def paired() -> Timeline:
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,0B2,0B3\n1F0,(1F1;1I0)OVERLAP_F_B,1W0,1F2,1B1,1F3,1B2,1B3"
    schedule = Schedule.from_csv(text, name="paired")
    return simulate(schedule, CostModel.even(schedule.placement, overlap=0.5))


def exchanging() -> Timeline:
    """One rank whose layers of experts exchange tokens."""
    return simulate(Schedule.from_csv("0F0,0I0,0W0"), CostModel((1,), (1,), (1,), exchange=(0.25,)))


def measured() -> Timeline:
    """In seconds, with gaps and uneven times."""
    plan = planned("1f1b", 4, 6)
    rows = tuple(
        tuple(
            Span(span.action, span.rank, span.start * 1.31e-2 + 1e-5, span.end * 1.31e-2 - index % 3 * 1e-3)
            for index, span in enumerate(row)
        )
        for row in plan.rows
    )
    return replace(plan, name="measured: 1f1b", rows=rows)


def empty() -> Timeline:
    return Timeline("empty", planned(ranks=2).placement, ((), ()))


def timeless() -> Timeline:
    """In which nothing takes time."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    return simulate(schedule, CostModel.even(schedule.placement, 0, 0, 0))


def with_a_moment() -> Timeline:
    """One span of which takes no time."""
    plan = planned("1f1b", 2, 3)
    first, *rest = plan.rows[0]
    return replace(plan, rows=((replace(first, end=first.start), *rest), plan.rows[1]))


def overlapping() -> Timeline:
    """As measured on a device: a span ends after the next one has started."""
    plan = planned("1f1b", 1, 3)
    row = tuple(replace(one, end=one.end + 0.25) for one, _ in pairwise(plan.rows[0])) + plan.rows[0][-1:]
    return replace(plan, rows=(row,))


SAMPLES = {
    "1f1b": planned(),
    "chunks": planned("interleaved-1f1b", chunks=3),
    "transfers": with_transfers(),
    "bytes": with_bytes(),
    "pairs": paired(),
    "reductions": reducing(),
    "two ways": reducing("chimera"),
    "free reductions": reducing(reduce=0),
    "measured": measured(),
    "empty": empty(),
    "timeless": timeless(),
    "moment": with_a_moment(),
    "overlapping": overlapping(),
    "one": planned("gpipe", 1, 1),
    "forward only": simulate(make_schedule("1f1b", ranks=3, microbatches=4).forward_only()),
    "hostile": replace(planned("1f1b", 2, 3), name=HOSTILE),
    "dense": planned("zb-h1", 4, 500),
}
