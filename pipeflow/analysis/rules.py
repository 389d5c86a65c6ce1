"""Which rules a search tries: a grid of plain ones, then variations of the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from random import Random

from pipeflow.analysis.bounds import Times
from pipeflow.analysis.list_scheduling import Rules
from pipeflow.analysis.problem import Problem

NEARLY = 0.999  # of a duration; a whole one would not fit a gap as long as itself, but for rounding
DEEP_FIRST, PIPELINED = (0.0, 0.5, 1.0, 2.0), (0.0, 0.5)


def plain_rules(given: Problem, heads: Times) -> Iterator[Rules]:
    """A grid over four numbers.

    - How far into the pipeline an action lies counts between nothing, so that the oldest microbatch goes first and of
      that its backward, and twice its head: younger forwards go before older backwards.
    - The activations that a stage may have alive are as many as its rank has slots; or its share of them: when a
      microbatch begins every `period`, a stage whose backward ends `trip` after its forward began has
      trip / period alive. The shortest period that fits the slots, and shorter ones.
    - F waits for a gradient that comes within none or half of its duration.
    - W waits for what comes within none, half or all of its duration.
    """
    letters = range(len(given.source))
    pace = max(given.work) / given.many
    ahead = 1e-6 * pace  # where all is equal, a backward goes first
    for shorter, deep, forward, weight in product(
        (None, 1.0, 0.9, 0.8, 0.6), (0.0, 0.5, 1.0, 2.0), (0.0, 0.5), (0.0, 0.5, NEARLY)
    ):
        offsets = tuple(deep * heads[letter][0] + (ahead if letter % 3 == 0 else 0.0) for letter in letters)
        patience = tuple((forward, 0.0, weight)[letter % 3] for letter in letters)
        yield Rules(pace, offsets, _limits(given, heads, shorter), patience)


def _limits(given: Problem, heads: Times, shorter: float | None) -> tuple[int, ...]:
    slots = tuple(given.slots[rank] for rank in given.ranks)
    if shorter is None:
        return slots
    trips = [
        heads[3 * stage + 1][0] + given.durations[3 * stage + 1] - heads[3 * stage][0]
        for stage in range(len(given.ranks))
    ]
    period = max(max(given.work) / given.many, 1e-9)

    def alive(period: float) -> tuple[int, ...]:
        return tuple(max(1, min(limit, ceil(trip / period - 1e-9))) for trip, limit in zip(trips, slots, strict=True))

    while any(
        sum(alive(period)[stage] for stage in held) > slots
        for held, slots in zip(given.stages, given.slots, strict=True)
    ):
        period *= 1.03
    return alive(shorter * period)


def varied(rules: Rules, given: Problem, random: Random) -> Rules:
    """`rules` with one of its three kinds of numbers changed for a few consecutive stages."""
    stages = len(given.ranks)
    first = random.randrange(stages)
    some = [(first + offset) % stages for offset in range(random.choice((1, 1, 2, 4, stages)))]
    what = random.randrange(3)
    if what == 0:
        limits = list(rules.limits)
        change = random.choice((-2, -1, 1, 2))
        for stage in some:
            limits[stage] = max(1, min(limits[stage], given.slots[given.ranks[stage]]) + change)
        return replace(rules, limits=tuple(limits))
    if what == 1:
        patience = list(rules.patience)
        half = random.choice((0, 2, 2))
        part = random.choice((0.0, 0.0, 0.25, 0.5, NEARLY) if half == 0 else (0.0, 0.25, 0.5, 0.75, NEARLY, 1.5))
        for stage in some:
            patience[3 * stage + half] = part
        return replace(rules, patience=tuple(patience))
    offsets = list(rules.offsets)
    half = random.choice((0, 1))
    change_by = random.gauss(0, 1) * rules.pace
    for stage in some:
        offsets[3 * stage + half] += change_by
    return replace(rules, offsets=tuple(offsets))
