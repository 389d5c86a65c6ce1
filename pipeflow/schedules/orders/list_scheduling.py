"""List scheduling: one pass over time in which every free rank takes, by rules, one of the actions it could run; orders
in two steps, in which weight-gradient halves are put into the gaps of the others; and when a given order runs. Must not
contain: changes of an order, and which rules a search tries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf
from operator import add, mul, sub
from sys import maxsize
from types import MappingProxyType
from typing import NamedTuple

from pipeflow.schedules.orders.lower_bounds import Bounds, Times, bounds
from pipeflow.schedules.orders.problem import Operations, Problem, each_path, numbered
from pipeflow.schedules.orders.rules import Rules

# Theory of operation
#
# An operation is one action of one stage, as a number: 3 * stage for F, plus 1 for I, plus 2 for W. The microbatches of
# an operation run in order, so `done[operation]` is the next one, and the state of a pass is a few numbers per
# operation and rank. Of a placement of several paths, each path has stages of its own (`Problem`). Events are times at
# which a rank may find work: it becomes free, or a value arrives. At each event the rank either takes an action or lets
# the event pass. The value that it waits for, or its own next end, is a later event.
#
# A gradient or an activation whose arrival is known, but is later than now, may be worth a wait: `patience` says how
# long. W has no user on another rank, so it waits in `deferred` and fills the time when nothing else can run.
#
# A limit on memory could end in a deadlock: ranks full of microbatches of which none can go on. `_reaches` prevents it
# for one path, so the pass never has to take an action back. Ranks that hold stages of several paths may still wait for
# each other in a circle. Then the rules lead to no order. The loop is one long function, because a search spends most
# of its time in it, and each call in it would cost more.


NONE = maxsize  # microbatches done of the operation before one that has none before it


class ScoredOrder(NamedTuple):
    """An order and its measures, the objective first. Orders are compared by these measures; smaller is better. `order`
    is that of the microbatches, as in `Problem`.
    """

    objective: float
    other: float
    sequences: list[Operations]
    order: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, problem: Problem, begins: Sequence[float], ends: Sequence[float], sequences: list[Operations]
    ) -> ScoredOrder:
        """The candidate whose ranks begin and end at these times."""
        span, makespan = max(end - begin for begin, end in zip(begins, ends, strict=True)), max(ends)
        measures = (span, makespan) if problem.objective == "span" else (makespan, span)
        return cls(*measures, sequences, problem.order)


class User(NamedTuple):
    """The user of an operation's value. `arrived` has the arrival time per microbatch, as far as it is known."""

    arrived: list[float]
    delay: float
    rank: int


def arrival_times(problem: Problem) -> tuple[list[list[float]], list[User | None]]:
    """Per operation, the arrival times of the value that it waits for, as far as they are known; and the user of its
    own value, on any rank. The batch has arrived at the first stage.
    """
    arrivals: list[list[float]] = [
        [0.0] * len(problem.places[operation // 3]) if source < 0 else []
        for operation, source in enumerate(problem.source)
    ]
    users: list[User | None] = [None for _ in arrivals]
    for operation, source in enumerate(problem.source):
        if source >= 0 and operation % 3 < 2:
            users[source] = User(arrivals[operation], problem.delays[operation], problem.ranks[operation // 3])
    return arrivals, users


NOTHING: Mapping[tuple[int, int], float] = MappingProxyType({})


class RunTimes(NamedTuple):
    """When the sequences of all ranks run: per rank the start of each operation, the end of the last, and the time from
    when each operation occupies the rank. It is the start, less the time of a recomputation before it.
    """

    starts: list[list[float]]
    ends: list[float]
    busy: list[list[float]]

    def candidate(self, problem: Problem, sequences: Sequence[Operations]) -> ScoredOrder:
        """The order of `sequences`, scored with these times."""
        return ScoredOrder.of(problem, [row[0] for row in self.starts], self.ends, list(sequences))


def run_times(
    problem: Problem, sequences: Sequence[Operations], again: Mapping[tuple[int, int], float] = NOTHING
) -> RunTimes | None:
    """Each operation as soon as its rank is free and its value there, as `simulate` does; None when some never run.
    `again` has the times of the recomputations directly before some I, per (stage, microbatch).
    """
    ranks, times = range(len(sequences)), list(map(problem.times, sequences))
    arrivals, users = arrival_times(problem)
    done, free = [0] * len(problem.durations), [0.0] * len(sequences)
    starts: list[list[float]] = [[] for _ in ranks]
    waits: list[list[float] | None] = [None for _ in ranks]
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        row, now = starts[rank], free[rank]
        for operation, time in islice(zip(sequences[rank], times[rank], strict=True), len(row), None):
            if operation % 3 < 2:
                arrived, microbatch = arrivals[operation], done[operation]
                if microbatch == len(arrived):
                    waits[rank] = arrived
                    break
                if again and operation % 3:
                    now += again.get((operation // 3, microbatch), 0.0)
                if arrived[microbatch] > now:
                    now = arrived[microbatch]
                done[operation] = microbatch + 1
                row.append(now)
                now += time
                user = users[operation]
                if user is not None:
                    user.arrived.append(now + user.delay)
                    if waits[user.rank] is user.arrived:
                        waits[user.rank] = None
                        ready.append(user.rank)
            else:
                row.append(now)
                now += time
        free[rank] = now
    whole = all(len(row) == len(sequence) for row, sequence in zip(starts, sequences, strict=True))
    if not whole:
        return None
    return RunTimes(starts, free, _busy(sequences, starts, again) if again else starts)


def _busy(
    sequences: Sequence[Operations], starts: Sequence[Sequence[float]], again: Mapping[tuple[int, int], float]
) -> list[list[float]]:
    """The starts, less the time of a recomputation before an I."""
    return [
        [
            start - again.get((operation // 3, microbatch), 0.0) if operation % 3 == 1 else start
            for (operation, microbatch), start in zip(numbered(sequence), row, strict=True)
        ]
        for sequence, row in zip(sequences, starts, strict=True)
    ]


class _State:
    """The state of a pass over all operations."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        operations = range(len(problem.source))
        arrivals, self.users = arrival_times(problem)
        self.before = problem.before
        self.done = [*(0 for _ in operations), NONE]  # the last: of an operation that has none before it
        self.whole = [*(len(problem.places[operation // 3]) for operation in operations), NONE]
        self.sequences: list[Operations] = [[] for _ in problem.stages]
        self.deferred: list[deque[int]] = [deque() for _ in problem.stages]  # the W that can run
        memory = problem.memory
        self.kept = [0.0 for _ in problem.stages]
        self.unfinished = [0.0 for _ in problem.stages]  # of microbatches with forwards left here
        self.durations = problem.each(problem.durations)
        sums = [*map(add, memory.at_start, memory.at_end)]
        saved, most_added = problem.each(memory.at_start), problem.each([*map(max, memory.at_start, sums)])
        self.changes = problem.each(sums)  # what an operation adds to what is kept
        self.begins: list[Sequence[float]] = problem.each([0.0 for _ in operations])  # to the unfinished: an F alone
        for stages in problem.of_paths:
            *own, last = (3 * stage for stage in stages)
            for operation in own:
                self.begins[operation] = saved[operation]
            if own:
                self.begins[last] = [-sum(each) for each in zip(*(saved[operation] for operation in own), strict=True)]
        self.begun = [0.0 for _ in problem.stages]
        self.free = [0.0 for _ in problem.stages]
        self.left = list(problem.work)
        self.origins = self.begun if problem.objective == "span" else [0.0 for _ in problem.stages]
        self.events = [(0.0, rank) for rank in range(len(problem.stages))]
        self.holds = tuple(map(mul, rules.patience, problem.durations))
        limits = rules.limits
        ages = [  # per operation and microbatch: the smallest goes first
            [rules.pace * place + offset for place in problem.places[operation // 3]]
            for operation, offset in enumerate(rules.offsets)
        ]
        self.gradients = [
            [
                (operation, arrivals[operation], ages[operation], [room - more for more in most_added[operation]])
                for operation in (3 * stage + 1 for stage in stages)
            ]
            for stages, room in zip(problem.stages, memory.room, strict=True)
        ]
        self.activations = [
            [
                (
                    3 * stage,
                    arrivals[3 * stage],
                    ages[3 * stage],
                    limits[stage],
                    [most - more for more in saved[3 * stage]],
                    *reach,
                )
                for stage, reach in zip(stages, _reaches(problem, stages, most), strict=True)
            ]
            for stages, most in zip(problem.stages, map(sub, memory.room, memory.spare), strict=True)
        ]


def _reaches(problem: Problem, stages: Sequence[int], most: float) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Per stage of a rank, how much the unfinished microbatches may keep where its F may still run: at least; and by
    how much more, for each F of the same microbatch that may come before or after this one, if it came before.

    A microbatch that begins must find room for its later chunks and slices, or a rank might fill up with some that
    never end. With this rule the oldest microbatch can always go on: all others on its way are unfinished, none of them
    is further, and the last of them left room for it: for the largest, if they differ.
    """
    found: list[tuple[float, tuple[tuple[int, float], ...]]] = []
    for own in each_path(stages, problem.stages_per_path):
        saved = {
            stage: problem.memory.at_start[3 * stage] * max(problem.factors[stage] if problem.factors else (1,))
            for stage in own
        }
        for stage in own[:-1]:
            left = sum(more for other, more in saved.items() if other == stage or not problem.comes_first(other, stage))
            others = (
                (3 * other, more)
                for other, more in saved.items()
                if not problem.comes_first(other, stage) and not problem.comes_first(stage, other) and other != stage
            )
            found.append((most - left, tuple(others)))
        found.append((inf, ()))
    return found


def list_schedule(problem: Problem, rules: Rules, stop: float = inf) -> ScoredOrder | None:
    """The order that `rules` lead to, sound and within the memory; None when its objective is found to be more than
    `stop`, or when ranks wait for each other. One pass, about a microsecond an action.
    """
    run = _State(problem, rules)
    durations, holds, changes, begins, before = run.durations, run.holds, run.changes, run.begins, run.before
    done, sequences, deferred, kept, unfinished = run.done, run.sequences, run.deferred, run.kept, run.unfinished
    begun, free, left, events = run.begun, run.free, run.left, run.events
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        picked, first, gradient, has, alive = -1, inf, inf, kept[rank], unfinished[rank]
        for operation, arrived, ages, rooms in run.gradients[rank]:
            microbatch = done[operation]
            if microbatch < len(arrived) and microbatch < done[before[operation]] and has <= rooms[microbatch]:
                arrival = arrived[microbatch]
                if arrival > now:
                    gradient = arrival if arrival < gradient else gradient
                elif ages[microbatch] < first:
                    picked, first = operation, ages[microbatch]
        soonest = gradient
        for operation, arrived, ages, cap, rooms, reach, others in run.activations[rank]:
            microbatch = done[operation]
            may = microbatch < len(arrived) and microbatch - done[operation + 1] < cap and has <= rooms[microbatch]
            if may and alive > reach:
                may = alive <= reach + sum(more for other, more in others if done[other] > microbatch)
            if may and microbatch < done[before[operation]]:
                arrival = arrived[microbatch]
                if arrival > now:
                    soonest = arrival if arrival < soonest else soonest
                elif ages[microbatch] < first and now + holds[operation] <= gradient:
                    picked, first = operation, ages[microbatch]
        if picked < 0:
            if not deferred[rank] or now + holds[deferred[rank][0]] > soonest:
                continue
            picked = deferred[rank].popleft()
        if now > free[rank]:
            if not sequences[rank]:
                begun[rank] = now
            elif now - run.origins[rank] + left[rank] > stop:
                return None
        sequences[rank].append(picked)
        microbatch = done[picked]
        time = durations[picked][microbatch]
        left[rank] -= time
        free[rank] = end = now + time
        done[picked] = microbatch + 1
        heappush(events, (end, rank))
        if (user := run.users[picked]) is not None:
            user.arrived.append(end + user.delay)
            heappush(events, (end + user.delay, user.rank))
        kept[rank] += changes[picked][microbatch]
        unfinished[rank] += begins[picked][microbatch]
        if picked % 3 == 1:
            deferred[rank].append(picked + 1)
    if any(map(len, deferred)) or done != run.whole:
        return None
    return ScoredOrder.of(problem, begun, free, sequences)


Step = tuple[int, int, int]  # one F or I of a skeleton: rank, operation, microbatch


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes candidates by rules: by list scheduling, or in two steps where the rules have a `slack`.

    Rules are numbers for microbatches that are `alike`, with the earliest starts `heads`. `skeleton` is a problem in
    which W takes no time. `begins` is per rank from when the objective counts: from 0, or for the span from the rank's
    earliest start. `bound` is the objective's lower bound.
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
        every = bounds(alike).heads if problem.factors else proved.heads
        durations = tuple(0.0 if operation % 3 == 2 else time for operation, time in enumerate(problem.durations))
        heads = tuple(min(every[3 * stage][0] for stage in stages) for stages in alike.stages)
        begins = heads if alike.objective == "span" else (0.0,) * len(heads)
        skeleton = replace(problem, durations=durations)
        return cls(problem, alike, skeleton, every, begins, proved.objective)

    def in_order(self, order: Sequence[int]) -> Builder:
        """The builder of orders that take the microbatches in this order."""
        return replace(self, problem=self.problem.in_order(order), skeleton=self.skeleton.in_order(order))

    def candidate(self, rules: Rules, stop: float = inf) -> ScoredOrder | None:
        """The order that `rules` lead to; None when its objective is found to be more than `stop`."""
        if rules.slack is None:
            return list_schedule(self.problem, rules, stop)
        found = list_schedule(self.skeleton, rules)
        if found is None:
            return None
        target = self.bound * (1 + rules.slack)
        return filled(self.problem, found.sequences, [begin + target for begin in self.begins], stop)


def filled(problem: Problem, skeleton: Sequence[Operations], ends: Sequence[float], stop: float) -> ScoredOrder | None:
    """The order of F and I in `skeleton`, with each W placed where there is time for it. None if its objective exceeds
    `stop`.

    A rank that waits for an F or I runs W in the meantime. A W that would end after that action has arrived may begin
    only in two cases: if all ranks can still end by `ends` (`_latest_starts`), or if the rank itself could not end by
    then if it waited. If memory is short for an action, W runs before it. (The heuristic in arXiv 2401.10241, section
    3.1, also lets a rank idle as long as another rank idles more.)
    """
    durations, memory = problem.each(problem.durations), problem.memory
    sums = [*map(add, memory.at_start, memory.at_end)]
    needs, changes = problem.each([*map(max, memory.at_start, sums)]), problem.each(sums)
    done = [0] * len(durations)
    arrivals, users = arrival_times(problem)
    sequences: list[Operations] = [[] for _ in skeleton]
    deferred: list[deque[int]] = [deque() for _ in skeleton]
    begun, free, kept = ([0.0] * len(skeleton) for _ in range(3))
    left = list(problem.work)

    def run(rank: int, operation: int) -> None:
        microbatch = done[operation]
        sequences[rank].append(operation)
        free[rank] += durations[operation][microbatch]
        left[rank] -= durations[operation][microbatch]
        kept[rank] += changes[operation][microbatch]
        done[operation] = microbatch + 1

    steps = _steps(problem, skeleton)
    for (rank, operation, microbatch), latest in zip(steps, _latest_starts(problem, steps, ends), strict=True):
        arrival, waiting = arrivals[operation][microbatch], deferred[rank]
        while waiting and kept[rank] + needs[operation][microbatch] > memory.room[rank]:
            run(rank, waiting.popleft())
        while waiting and free[rank] < arrival:
            late = free[rank] + durations[waiting[0]][done[waiting[0]]] > max(arrival, latest)
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


def _steps(problem: Problem, skeleton: Sequence[Operations]) -> list[Step]:
    """The F and I of `skeleton`, each after those that it waits for."""
    rows = [[operation for operation in sequence if operation % 3 < 2] for sequence in skeleton]
    followers = {source: operation for operation, source in enumerate(problem.source) if operation % 3 < 2}
    done, steps = [0] * len(problem.source), list[Step]()
    places, ready = [0] * len(rows), list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row = rows[rank]
        for place in range(places[rank], len(row)):
            operation, places[rank] = row[place], place
            source, microbatch = problem.source[operation], done[operation]
            if source >= 0 and done[source] <= microbatch:
                break
            steps.append((rank, operation, microbatch))
            done[operation], places[rank] = microbatch + 1, place + 1
            if operation in followers and (other := problem.ranks[followers[operation] // 3]) != rank:
                ready.append(other)
    return steps


def _latest_starts(problem: Problem, steps: Sequence[Step], ends: Sequence[float]) -> list[float]:
    """Per step, the latest start with which every rank ends by its end. It assumes that all W of this rank run right
    after their I, and those of other ranks wherever they fit.
    """
    followers = {source: operation for operation, source in enumerate(problem.source) if operation % 3 < 2}
    starts = [[0.0] * len(problem.places[operation // 3]) for operation in range(len(problem.source))]
    following, until = [inf] * len(ends), list(ends)  # the start of the next step; the end less all work after
    latest, durations = [], problem.each(problem.durations)
    for rank, operation, microbatch in reversed(steps):
        if operation % 3 == 1:
            until[rank] -= durations[operation + 1][microbatch]
        end = min(following[rank], until[rank])
        if operation in followers:
            user = followers[operation]
            end = min(end, starts[user][microbatch] - problem.delays[user])
        start = following[rank] = starts[operation][microbatch] = end - durations[operation][microbatch]
        until[rank] -= durations[operation][microbatch]
        latest.append(start)
    latest.reverse()
    return latest
