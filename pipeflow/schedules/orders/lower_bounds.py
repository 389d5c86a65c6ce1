"""Lower bounds: a makespan or a span that no order can go below, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain, product
from math import floor, inf
from operator import mul
from typing import NamedTuple

from pipeflow.schedules.orders.problem import Problem

Times = Sequence[Sequence[float]]  # per operation and microbatch


class Arc(NamedTuple):
    """`user` of microbatch m + `later` begins no sooner than `delay` after `maker` of microbatch m has ended."""

    maker: int
    user: int
    later: int
    delay: float


def arcs(problem: Problem) -> Iterator[Arc]:
    """The arcs that hold in every order within the memory in which microbatches do not overtake each other.

    Microbatches are interchangeable. If the k-th microbatch of each operation is renamed to k, no time changes, and the
    k-th use of a value still follows its k-th production. So overtaking gains nothing, with one exception that is
    ignored here: it could let a rank begin later than necessary, which counts for `Timeline.span`.

    Memory: let a rank begin F of stage i for microbatch n before I of its stage j for microbatch m <= n has ended. Then
    at some time its stages up to both i and j keep the activations of all of m..n, and each other stage up to one of
    them keeps one activation. If there is no room for all these, F must wait. In the same way F must wait for W, while
    its stage keeps activations or deferred products of m..n. (Stages up to i are i and those whose F always comes
    first, and their I last: `Problem.comes_first`. Without slices these are all of lower number.)

    Microbatches that differ may come in any order, so of them only the waits for values hold.
    """
    for operation, source in enumerate(problem.source):
        if source >= 0:
            yield Arc(source, operation, 0, problem.delays[operation])
    for operation, before in enumerate(problem.before):
        if before >= 0:
            yield Arc(before, operation, 0, 0.0)
    if problem.factors:
        return
    for operation in range(len(problem.source)):
        yield Arc(operation, operation, 1, 0.0)
    memory = problem.memory
    for stages in problem.of_paths:
        room, microbatches = memory.room[problem.ranks[stages[0]]], len(problem.places[stages[0]])
        up_to = {
            stage: {each for each in stages if each == stage or problem.comes_first(each, stage)} for stage in stages
        }
        for forward, backward in product(stages, repeat=2):
            both, one = up_to[forward] & up_to[backward], up_to[forward] ^ up_to[backward]
            low, once = (sum(memory.at_start[3 * each] for each in some) for some in (both, one))
            most = (room - once) / low if low else microbatches
            yield Arc(3 * backward + 1, 3 * forward, floor(min(most, microbatches)), 0.0)
        for stage in stages:
            saved, least = memory.at_start[3 * stage], min(memory.at_start[3 * stage], -memory.at_end[3 * stage + 2])
            most = (room - saved) / least + 1 if least else microbatches
            yield Arc(3 * stage + 2, 3 * stage, floor(min(most, microbatches)), 0.0)


class Bounds(NamedTuple):
    """Per operation and microbatch, `heads`: the earliest start. `tails`: the least time from its end to the end of a
    rank, less that rank's start, over the ranks whose start is known. Per rank, `starts`: when it begins, if in every
    order it begins then, else None; a makespan counts from 0 on all ranks. `objective`: the lower bound.
    """

    heads: Times
    tails: Times
    starts: list[float | None]
    objective: float


def bounds(problem: Problem) -> Bounds:
    """A lower bound on the objective of all orders of `problem`, from three arguments, and that of
    `largest_microbatch` for microbatches that differ.

    - Work: a rank's span is at least its work. A makespan is no shorter than a span.
    - Paths: the longest path through `arcs` to an action, the action, and the longest path from there to a rank's end.
      If a stage and all stages before it are the first of their ranks, its rank begins as soon as one microbatch can
      get there. The span of this rank is then its end minus a constant. Of microbatches that differ, any may be first.
      Where there are several paths, no rank's start is taken for known.
    - One rank: the actions of a rank run one at a time, none before its head. If actions could be interrupted, always
      running the available one with the longest tail would end all of them, tails included, soonest. This is Jackson's
      preemptive schedule (J. Carlier, The one-machine sequencing problem, 1982). No order can be faster.
    """
    stages = range(len(problem.ranks))  # an order in which the operations of one microbatch per path can run
    order = [3 * stage for stage in stages] + [3 * stage + half for stage in reversed(stages) for half in (1, 2)]
    alone = len(problem.ranks) == problem.stages_per_path  # one path
    found = list(arcs(problem))
    times, passing = problem.each(problem.durations), _passing(problem)
    heads = _heads(problem, found, order, times, passing)
    makespan = problem.objective == "makespan"
    starts: list[float | None] = [0.0 if makespan else None] * len(problem.stages)
    for stage in () if makespan or not alone else stages[:: problem.slices]:
        rank = problem.ranks[stage]
        if problem.stages[rank][0] != stage or (problem.factors and stage):
            break
        starts[rank] = heads[3 * stage][0]
    tails = _tails(problem, found, order, times, passing, starts)
    least = max(problem.work)
    if problem.factors and alone and problem.slices == 1:
        passes = [sum(map(mul, problem.delays, each)) for each in zip(*passing, strict=True)]
        least = max(least, largest_microbatch(times, problem.num_microbatches - 1, passes))
    for own in problem.stages:
        operations = [3 * stage + half for stage in own for half in range(3)]
        jobs = chain.from_iterable(
            zip(heads[operation], times[operation], tails[operation], strict=True) for operation in operations
        )
        least = max(least, _preemptive(sorted(jobs)))
    return Bounds(heads, tails, starts, least)


def largest_microbatch(times: Times, others: int, passes: Sequence[float] = ()) -> float:
    """The least time on the rank of the first stage, if a microbatch takes its path together with so many `others`: the
    most over all microbatches, of which the largest one mostly gives it. `times` are those of F, I and W of each stage,
    per microbatch; `passes` has per microbatch the time between ranks on the whole path. Default: none.

    The microbatch passes all stages one after the other, and its gradient comes back. Each other one runs on the first
    stage before it goes, or after it is back, or overtakes it on the way. In all three cases nothing hides the time of
    an F or an I of the other one.
    """
    columns = [*zip(*times, strict=True)]  # per microbatch
    ways = [[time for operation, time in enumerate(column) if operation % 3 < 2] for column in columns]
    shortest = [min(way) for way in ways]
    least = sorted(shortest)
    some, more = sum(least[:others]), sum(least[: others + 1])
    found = 0.0
    for way, column, own, passed in zip(ways, columns, shortest, passes or (0.0,) * len(ways), strict=True):
        rest = more - own if own <= least[others] else some
        found = max(found, sum(way) + column[2] + passed + rest)
    return found


def _passing(problem: Problem) -> Times:
    """Per operation and microbatch, the least share of its delay: the latency has no factor, and what occupies the link
    has that of the stage that makes the activation.
    """
    if not problem.factors:
        return problem.each([1.0] * len(problem.source))
    makers = (min(operation, source) // 3 for operation, source in enumerate(problem.source))
    return [[min(1, factor) for factor in problem.factors[max(maker, 0)]] for maker in makers]


def _heads(problem: Problem, found: list[Arc], order: list[int], times: Times, passing: Times) -> Times:
    into: list[list[Arc]] = [[] for _ in problem.source]
    for arc in found:
        into[arc.user].append(arc)
    heads = [[0.0] * len(row) for row in times]
    for microbatch in range(problem.num_microbatches):
        for operation in order:
            if microbatch >= len(heads[operation]):
                continue
            latest = 0.0
            for maker, _, later, delay in into[operation]:
                if microbatch >= later:
                    before = microbatch - later
                    latest = max(
                        latest, heads[maker][before] + times[maker][before] + delay * passing[operation][before]
                    )
            heads[operation][microbatch] = latest
    return heads


def _tails(
    problem: Problem,
    found: list[Arc],
    order: list[int],
    times: Times,
    passing: Times,
    starts: list[float | None],
) -> Times:
    out: list[list[Arc]] = [[] for _ in problem.source]
    for arc in found:
        out[arc.maker].append(arc)
    tails = [[0.0] * len(row) for row in times]
    for microbatch in reversed(range(problem.num_microbatches)):
        for operation in reversed(order):
            if microbatch >= len(tails[operation]):
                continue
            start = starts[problem.ranks[operation // 3]]
            longest = -inf if start is None else -start
            for _, user, later, delay in out[operation]:
                if (after := microbatch + later) < len(tails[user]):
                    longest = max(longest, delay * passing[user][after] + times[user][after] + tails[user][after])
            tails[operation][microbatch] = longest
    return tails


def _preemptive(jobs: list[tuple[float, float, float]]) -> float:
    """The least largest end plus tail of (head, duration, tail) on one machine that may interrupt; heads ascending."""
    ready: list[tuple[float, float]] = []  # (-tail, what is left of the duration)
    now, worst = 0.0, -inf
    for index, (head, duration, tail) in enumerate(jobs):
        now = max(now, head)
        heappush(ready, (-tail, duration))
        until = jobs[index + 1][0] if index + 1 < len(jobs) else inf
        while ready and now < until:
            negative, left = ready[0]
            if now + left > until:
                heapreplace(ready, (negative, left - (until - now)))
                now = until
            else:
                now += left
                heappop(ready)
                worst = max(worst, now - negative)
    return worst
