"""Rules: how a free rank of list scheduling chooses its next action, and which rules a search tries. Must not contain:
the pass over time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product, zip_longest
from math import ceil
from random import Random

from pipeflow.schedules.orders.lower_bounds import Times
from pipeflow.schedules.orders.problem import Problem


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which a free rank chooses its next action.

    Among the F and I that can run, it takes the one with the smallest `pace * place + offsets[operation]`, with the
    place of its microbatch in the order of all. A stage has at most `limits[stage]` activations alive. W runs when
    nothing else can.

    An F is not begun if a gradient is known to arrive within `patience[operation]` of the F's duration. The same is
    true for a W, if a gradient or an activation is known to arrive.

    With a `slack`, these rules are for F and I alone, and W is added later (`filled`). It may delay them
    as long as the objective stays below `1 + slack` times its lower bound.
    """

    pace: float
    offsets: tuple[float, ...]
    limits: tuple[int, ...]
    patience: tuple[float, ...]
    slack: float | None = None


NEARLY = 0.999  # of a duration; the whole of it might not fit a gap as long, for rounding
FORWARD_PATIENCE = (0.0, 0.0, 0.25, 0.5, NEARLY)
WEIGHT_PATIENCE = (0.0, 0.25, 0.5, 0.75, NEARLY, 1.5)
SLACKS = (0.0, 0.003)


def plain_rules(problem: Problem, heads: Times) -> Iterator[Rules]:
    """Two grids of rules in turn, one with a slack and one without. Each is a grid over a few numbers, of which the
    last one varies fastest.

    - A stage may have as many activations alive as its rank has room for; or its share of them, or of more than them
      (`_shares`).
    - The depth of an action in the pipeline has the weight 0, so that the oldest microbatch goes first, and a backward
      goes before later forwards. Or it has a weight of up to twice its head, so that forwards of later microbatches go
      first.
    - F waits for a gradient that comes within a part of its duration.
    - With a slack the oldest microbatch goes first; without, W waits for what comes within none, half or all of its
      duration.
    """
    operations = range(len(problem.source))
    pace = max(problem.work) / problem.num_microbatches
    most = tuple(map(problem.most_alive, range(len(problem.ranks))))
    every_limit = (most, *(_shares(problem, heads, faster) for faster in (1.0, 0.9, 0.8, 0.6)))
    filled = product(every_limit, (0.0,), (NEARLY, 0.9, 0.5), (0.0,), SLACKS)
    direct = product(every_limit, (0.0, 0.5, 1.0, 2.0), (0.0, 0.5), (0.0, 0.5, NEARLY), (None,))
    for limits, weight, forward, deferred, slack in filter(None, chain.from_iterable(zip_longest(filled, direct))):
        after = (1e-6 * pace, 0.0, 0.0)  # where all is equal a backward goes first
        offsets = tuple(weight * heads[operation][0] + after[operation % 3] for operation in operations)
        patience = tuple((forward, 0.0, deferred)[operation % 3] for operation in operations)
        yield Rules(pace, offsets, limits, patience, slack)


def _shares(problem: Problem, heads: Times, faster: float) -> tuple[int, ...]:
    """Per stage, the activations alive when a microbatch begins every `period` and needs nothing but its own time: the
    trip from its F to the end of its I / period. The shortest period for which there is room, times `faster`.
    """
    stages = range(len(problem.ranks))
    trips = [heads[3 * stage + 1][0] + problem.durations[3 * stage + 1] - heads[3 * stage][0] for stage in stages]

    def alive(stage: int, period: float) -> int:
        return max(1, min(ceil(trips[stage] / period - 1e-9), problem.most_alive(stage)))

    period = max(*problem.work, 1e-9) / problem.num_microbatches
    saved = problem.memory.at_start[::3]
    for own, room in zip(problem.stages, problem.memory.room, strict=True):
        while sum(saved[stage] * alive(stage, period) for stage in own) > room:
            if all(alive(stage, period) == 1 for stage in own):  # of several paths, which share the room
                break
            period *= 1.03
    return tuple(alive(stage, faster * period) for stage in stages)


def varied(rules: Rules, problem: Problem, random: Random) -> Rules:
    """`rules` with the limit, a patience or an offset of a few consecutive stages changed, or the slack."""
    stages = len(problem.ranks)
    first, number = random.randrange(stages), random.choice((1, 1, 2, 4, stages))
    some = [(first + index) % stages for index in range(number)]
    limits, patience, offsets, slack = list(rules.limits), list(rules.patience), list(rules.offsets), rules.slack
    match random.randrange(6):
        case 0 | 1:
            change = random.choice((-2, -1, 1, 2))
            for stage in some:
                limits[stage] = max(1, min(limits[stage] + change, problem.most_alive(stage)))
        case 2 | 3:
            half, parts = random.choice(((0, FORWARD_PATIENCE), (2, WEIGHT_PATIENCE), (2, WEIGHT_PATIENCE)))
            part = random.choice(parts)
            if half == 2 and slack is not None:
                slack = random.choice(SLACKS)
            for stage in some:
                patience[3 * stage + half] = part
        case half:
            later = random.gauss() * rules.pace
            for stage in some:
                offsets[3 * stage + half - 4] += later
    return Rules(rules.pace, tuple(offsets), tuple(limits), tuple(patience), slack)
