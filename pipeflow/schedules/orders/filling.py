"""Filling: orders in two steps. First forwards and input-gradient halves alone are ordered by list scheduling; then
weight-gradient halves are put into the gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from pipeflow.schedules.orders.list_scheduling import Rules, ScoredOrder, arrival_times, list_schedule
from pipeflow.schedules.orders.lower_bounds import Bounds, Times, bounds
from pipeflow.schedules.orders.neighbours import run_times
from pipeflow.schedules.orders.problem import Operations, Problem


class SkeletonStep(NamedTuple):
    """One F or I of a skeleton."""

    rank: int
    operation: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes candidates by rules: by list scheduling, or in two steps where the rules have a `slack`.

    Rules take microbatches as `alike`, with the earliest starts `heads`; what they lead to is measured in `problem`.
    `skeleton` is a problem in which W takes no time. `begins` is per rank from when the objective counts: from 0, or
    for the span from the rank's earliest start. `bound` is the objective's lower bound.
    """

    problem: Problem
    alike: Problem
    skeleton: Problem
    heads: Times
    begins: tuple[float, ...]
    bound: float

    @classmethod
    def of(cls, problem: Problem, proved: Bounds) -> Builder:
        """The builder for a problem with these bounds."""
        alike = problem.alike()
        proved = bounds(alike) if problem.factors else proved
        durations = tuple(0.0 if operation % 3 == 2 else time for operation, time in enumerate(alike.durations))
        heads = tuple(min(proved.heads[3 * stage][0] for stage in stages) for stages in alike.stages)
        begins = heads if alike.objective == "span" else (0.0,) * len(heads)
        skeleton = replace(alike, durations=durations)
        return cls(problem, alike, skeleton, proved.heads, begins, proved.objective)

    def candidate(self, rules: Rules, stop: float = inf) -> ScoredOrder | None:
        """The order that `rules` lead to; None when its objective is found to be more than `stop`."""
        if self.problem is self.alike:
            return self._made(rules, stop)
        made = self._made(rules, inf)
        assert made is not None  # it has nothing to stop at
        times = run_times(self.problem, made.sequences)
        assert times is not None  # its order can run
        return times.candidate(self.problem, made.sequences)

    def _made(self, rules: Rules, stop: float) -> ScoredOrder | None:
        if rules.slack is None:
            return list_schedule(self.alike, rules, stop)
        found = list_schedule(self.skeleton, rules)
        assert found is not None  # it has nothing to stop at
        target = self.bound * (1 + rules.slack)
        return filled(self.alike, found.sequences, [begin + target for begin in self.begins], stop)


def filled(problem: Problem, skeleton: Sequence[Operations], ends: Sequence[float], stop: float) -> ScoredOrder | None:
    """The order of F and I in `skeleton`, with each W placed where there is time for it. None if its objective exceeds
    `stop`.

    A rank that waits for an F or I runs W in the meantime. A W that would end after that action has arrived may begin
    only in two cases: if all ranks can still end by `ends` (`_latest_starts`), or if the rank itself could not end by
    then if it waited. If memory is short for an action, W runs before it. (The heuristic in arXiv 2401.10241, section
    3.1, also lets a rank idle as long as another rank idles more.)
    """
    durations, memory = problem.durations, problem.memory
    needs = [max(start, start + end) for start, end in zip(memory.at_start, memory.at_end, strict=True)]
    arrivals, users = arrival_times(problem)
    sequences: list[Operations] = [[] for _ in skeleton]
    deferred: list[deque[int]] = [deque() for _ in skeleton]
    begun, free, kept = ([0.0] * len(skeleton) for _ in range(3))
    left = list(problem.work)

    def run(rank: int, operation: int) -> None:
        sequences[rank].append(operation)
        free[rank] += durations[operation]
        left[rank] -= durations[operation]
        kept[rank] += memory.at_start[operation] + memory.at_end[operation]

    steps = _steps(problem, skeleton)
    for (rank, operation, microbatch), latest in zip(steps, _latest_starts(problem, steps, ends), strict=True):
        arrival, waiting = arrivals[operation][microbatch], deferred[rank]
        while waiting and kept[rank] + needs[operation] > memory.room[rank]:
            run(rank, waiting.popleft())
        while waiting and free[rank] < arrival:
            late = free[rank] + durations[waiting[0]] > max(arrival, latest)
            if late and arrival + left[rank] <= ends[rank]:
                break
            run(rank, waiting.popleft())
        free[rank] = max(free[rank], arrival)
        if not sequences[rank] and problem.objective == "span":
            begun[rank] = arrival
        if free[rank] - begun[rank] + left[rank] > stop:
            return None
        run(rank, operation)
        if operation % 3 == 1:
            waiting.append(operation + 1)
        if (user := users[operation]) is not None:
            user.arrived.append(free[rank] + user.delay)
    for rank, waiting in enumerate(deferred):
        while waiting:
            run(rank, waiting.popleft())
    return ScoredOrder.of(problem, begun, free, sequences)


def _steps(problem: Problem, skeleton: Sequence[Operations]) -> list[SkeletonStep]:
    """The F and I of `skeleton`, each after those that it waits for."""
    rows = [[operation for operation in sequence if operation % 3 < 2] for sequence in skeleton]
    followers = {source: operation for operation, source in enumerate(problem.source) if operation % 3 < 2}
    done, steps = [0] * len(problem.source), []
    places, ready = [0] * len(rows), list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row = rows[rank]
        for place in range(places[rank], len(row)):
            operation, places[rank] = row[place], place
            source, microbatch = problem.source[operation], done[operation]
            if source >= 0 and done[source] <= microbatch:
                break
            steps.append(SkeletonStep(rank, operation, microbatch))
            done[operation], places[rank] = microbatch + 1, place + 1
            if operation in followers and (other := problem.ranks[followers[operation] // 3]) != rank:
                ready.append(other)
    return steps


def _latest_starts(problem: Problem, steps: Sequence[SkeletonStep], ends: Sequence[float]) -> list[float]:
    """Per step, the latest start with which every rank ends by its end. It assumes that all W of this rank run right
    after their I, and those of other ranks wherever they fit.
    """
    followers = {source: operation for operation, source in enumerate(problem.source) if operation % 3 < 2}
    starts = [[0.0] * problem.num_microbatches for _ in problem.source]
    following, until = [inf] * len(ends), list(ends)  # the start of the next step; the end less all work after
    latest = []
    for rank, operation, microbatch in reversed(steps):
        if operation % 3 == 1:
            until[rank] -= problem.durations[operation + 1]
        end = min(following[rank], until[rank])
        if operation in followers:
            user = followers[operation]
            end = min(end, starts[user][microbatch] - problem.delays[user])
        start = following[rank] = starts[operation][microbatch] = end - problem.durations[operation]
        until[rank] -= problem.durations[operation]
        latest.append(start)
    latest.reverse()
    return latest
