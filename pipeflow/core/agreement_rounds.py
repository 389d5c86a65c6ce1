"""Rounds: the order in which ranks exchange data until every rank has the data of all (Bruck's algorithm), and the time
of a step that ends in them. Must not contain: the transfers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.core.cost import CostModel, require_cost_model
from pipeflow.core.timeline import Timeline, require_timeline


def rounds(ranks: int) -> Iterator[tuple[int, int]]:
    """The ceil(log2 `ranks`) rounds, as (distance, number): every rank r sends to rank r - distance the data of so many
    ranks, its own and those of the ranks after it. A rank then has the data of twice as many ranks, or of all.
    """
    distance = 1
    while distance < ranks:
        yield distance, min(distance, ranks - distance)
        distance *= 2


def step_time(timeline: Timeline, cost: CostModel) -> float:
    """The time from the start of a step until its last rank continues: the makespan, plus the agreement at the end.

    When a rank has finished its row, it posts the receives of all rounds of the agreement. In each round it sends its
    results to one rank and waits for the results of another rank. A message leaves when its rank has it and knows that
    the receiver has posted its receive. The rank knows this one latency after the post. The message then takes another
    latency to arrive. Messages are so short that their bytes do not count.

    Two ranks end at 11 and at 10, with a latency of 1. Rank 1 knows at 12 of the receive that rank 0 posts at 11, and
    its message arrives at 13:

    >>> from pipeflow import CostModel, make_schedule, simulate
    >>> schedule = make_schedule("gpipe", ranks=2, microbatches=1)
    >>> cost = CostModel((5, 4), (0, 0), (0, 0), latency=1)
    >>> timeline = simulate(schedule, cost)
    >>> timeline.makespan, step_time(timeline, cost)
    (11.0, 13.0)
    """
    require_timeline(timeline)
    require_cost_model(cost)
    ends = [max((span.end for span in row), default=0.0) for row in timeline.rows]
    size, now, gone = len(ends), list(ends), list(ends)
    for distance, _ in rounds(size):
        leaves = []
        for rank, time in enumerate(now):
            to = (rank - distance) % size
            leaves.append(max(time, ends[to] + cost.link(to, rank).latency))
        sources = [(rank + distance) % size for rank in range(size)]
        now = [max(now[rank], leaves[source] + cost.link(source, rank).latency) for rank, source in enumerate(sources)]
        gone = [max(pair) for pair in zip(gone, leaves, strict=True)]
    return max((*now, *gone), default=0.0)
