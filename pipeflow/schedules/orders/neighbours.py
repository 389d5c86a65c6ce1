"""Neighbours: small changes of an order on its longest path, the only place where it can gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from pipeflow.schedules.orders.list_scheduling import ScoredOrder, arrival_times
from pipeflow.schedules.orders.problem import Operations, Problem

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
    done: Counter[int] = Counter()
    busy: list[list[float]] = []
    for sequence, row in zip(sequences, starts, strict=True):
        busy.append([])
        for operation, start in zip(sequence, row, strict=True):
            taken = again.get((operation // 3, done[operation]), 0.0) if operation % 3 == 1 else 0.0
            busy[-1].append(start - taken)
            done[operation] += 1
    return busy


def fits(problem: Problem, rank: int, sequence: Operations) -> bool:
    """Whether a rank's sequence keeps within its memory, and every F precedes its I and that its W."""
    memory, room, factors = problem.memory, problem.memory.room[rank], problem.factors
    kept, done = 0.0, [0] * len(problem.source)
    for operation in sequence:
        begins, ends = memory.at_start[operation], memory.at_end[operation]
        if factors:
            begins, ends = begins * factors[done[operation]], ends * factors[done[operation]]
        done[operation] += 1
        most = kept + begins
        kept = most + ends
        if max(most, kept) > room or (operation % 3 and done[operation] > done[operation - 1]):
            return False
    return True


class CriticalBlock(NamedTuple):
    """Operations `first` to `last` of a rank's sequence, run without a pause on the longest path."""

    rank: int
    first: int
    last: int


def critical_blocks(problem: Problem, sequences: Sequence[Operations], times: RunTimes) -> list[CriticalBlock]:
    """The blocks of two operations or more on a longest path to the end of a rank that the objective is measured on."""
    places: list[list[int]] = [[] for _ in problem.source]  # per operation, its positions
    for sequence in sequences:
        for position, operation in enumerate(sequence):
            places[operation].append(position)
    spans = [
        end - (row[0] if problem.objective == "span" else 0.0)
        for row, end in zip(times.starts, times.ends, strict=True)
    ]
    rank = spans.index(max(spans))
    last = first = len(sequences[rank]) - 1
    lengths, blocks = list(map(problem.times, sequences)), []
    while True:
        sequence, starts, busy = sequences[rank], times.starts[rank], times.busy[rank]
        while first and starts[first - 1] + lengths[rank][first - 1] >= busy[first]:
            first -= 1
        if first < last:
            blocks.append(CriticalBlock(rank, first, last))
        operation = sequence[first]
        if problem.source[operation] < 0:
            return blocks
        maker = problem.source[operation]
        position = places[maker][places[operation].index(first)]
        rank, first, last = problem.ranks[maker // 3], position, position


def neighbour(
    problem: Problem, sequences: Sequence[Operations], blocks: Sequence[CriticalBlock], random: Random
) -> list[Operations] | None:
    """`sequences` with one operation of a block moved within it, mostly to one of its ends (E. Balas and A.
    Vazacopoulos, Guided local search with shifting bottleneck for job shop scheduling, 1998); None when the move is not
    sound.
    """
    rank, first, last = random.choice(blocks)
    place = random.randint(first, last)
    target = random.choice((first, first, last, last, random.randint(first, last)))
    sequence = sequences[rank].copy()
    sequence.insert(target, sequence.pop(place))
    if sequence == sequences[rank] or not fits(problem, rank, sequence):
        return None
    return [*sequences[:rank], sequence, *sequences[rank + 1 :]]
