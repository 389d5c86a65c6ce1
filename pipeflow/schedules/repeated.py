"""Repeated: orders in which every microbatch runs as the one before, a period later. They are no named schedules, but
searches start from them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule


def repeated_on(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """Orders that repeat, for a placement of one path with several stages per rank: with backwards at once, and after
    one or two thirds of a period.

    In the period each rank runs F, I and W of each of its stages, each for a unit of time. All of a microbatch runs as
    early as this allows, in its order: software pipelining by modulo scheduling (M. Lam, Software pipelining, PLDI
    1988). What is saved stays for the same time on each rank in all periods, so a link to the host that keeps up once
    always does: the uniform repeat of PipeOffload (arXiv 2503.01328) is of this kind.
    """
    most = max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks))
    if len(placement.paths) > 1 or most == 1:
        return
    for pause in (0, most, 2 * most):
        starts = _starts(placement, 3 * most, pause)
        timed = [
            (start + 3 * most * microbatch, placement.paths[0][stage], Action(kind, stage, microbatch))
            for (kind, stage), start in starts.items()
            for microbatch in range(microbatches)
        ]
        timed.sort(key=lambda each: each[0])
        rows = (tuple(action for _, on, action in timed if on == rank) for rank in range(placement.num_ranks))
        yield Schedule(f"repeated, backwards after {pause}", placement, microbatches, tuple(rows))


def _starts(placement: Placement, period: int, pause: int) -> dict[tuple[Kind, int], int]:
    """When each action of the first microbatch starts."""
    free = [[True] * period for _ in range(placement.num_ranks)]
    starts: dict[tuple[Kind, int], int] = {}

    def run(kind: Kind, stage: int, earliest: int) -> int:
        """Puts an action into the first free slot of its rank from `earliest` on. Returns when it ends."""
        own, start = free[placement.paths[0][stage]], earliest
        while not own[start % period]:
            start += 1
        own[start % period], starts[kind, stage] = False, start
        return start + 1

    now = 0
    for stage in range(placement.num_stages):
        now = run(Kind.F, stage, now)
    now += pause
    for stage in reversed(range(placement.num_stages)):
        now = run(Kind.I, stage, now)
        run(Kind.W, stage, now)
    return starts
