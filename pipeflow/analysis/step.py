"""Step: the time of a whole step, in which all ranks agree at the end that it is over."""

from __future__ import annotations

from pipeflow.core.bruck import rounds
from pipeflow.core.cost import CostModel
from pipeflow.core.timeline import Timeline


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
