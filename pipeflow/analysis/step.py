"""Step: how long a step takes whose computations run as in a timeline: until all ranks have agreed that it is over."""

from __future__ import annotations

from pipeflow.core.cost import CostModel
from pipeflow.core.rounds import rounds
from pipeflow.core.timeline import Timeline


def step_time(timeline: Timeline, cost: CostModel) -> float:
    """The time from the start of a step to when its last rank goes on: the makespan, and the agreement that ends it.

    A rank that has come to its end posts the receives of all rounds; in each it sends to one rank what it knows, and
    waits for what another one knows. A message is sent when its rank has it and knows that the other end has posted for
    it, a latency after that was done, and takes a latency. What a rank says is too short to count its bytes.

    Two ranks end at 11 and at 10, a latency of 1 apart. Rank 1 knows at 12 of the receive that rank 0 posts at 11, and
    what it then sends is there at 13:

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
