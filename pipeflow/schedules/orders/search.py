"""Search: the best order of a problem to be found within a budget, with a proof of how good it is; and the moves that
change an order on its longest path, the only place where it can gain. Must not contain: which schedules it starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from math import inf
from random import Random
from time import perf_counter
from typing import NamedTuple

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, pairing_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.orders.list_scheduling import NONE, Builder, RunTimes, ScoredOrder, run_times
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.problem import (
    Objective,
    Operations,
    Problem,
    arrangements,
    keeps_within,
    to_schedule,
    to_sequences,
    with_hidden,
)
from pipeflow.schedules.orders.rules import Rules, plain_rules, varied

# Theory of operation
#
# A list schedule goes forward in time: whenever a rank is free, rules choose its next action among those that can
# start. Rules are a few numbers, so the search varies these numbers rather than orders: first on a grid, then at
# random around the best ones. That finds good orders fast, but no rules may lead to the best one. So moves change the
# best order itself. They exchange actions on its longest path, since no other exchange can make it shorter. A bound
# that no order undercuts ends the search early and says how good the result is. The generator of random numbers has a
# fixed seed: with a number of candidates instead of a deadline, the result is always the same.

ROUND = 100  # candidates, of rules and of moves each, after which moves start anew from the best order
PROPOSALS = 50  # of a move, until one is sound
NEAR = 1.01  # how many times the best objective the one may be that a climb by rules begins with
FIRST = 3  # rules that are tried for each order of microbatches that differ, to choose one
EXCHANGED = 0.1  # the share of moves that exchange two microbatches which differ
SLACK = 0.002  # how much longer, on average, the candidate may be that a climb goes on from


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        schedule: the best schedule that was found.
        timeline: its timeline under the given costs.
        lower_bound: a lower bound on the makespan or span of all orders in which every stage takes the microbatches in
            the same order (see `lower_bounds.arcs`).
        objective: "makespan" or "span": the measure that the search made small.
    """

    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    objective: Objective = "makespan"

    @property
    def gap(self) -> float:
        """The objective relative to the lower bound, minus 1. At 0 the order is proved to be the best."""
        return measured(self.timeline, self.objective) / self.lower_bound - 1 if self.lower_bound else 0.0


def measured(timeline: Timeline, objective: Objective) -> float:
    """The makespan or the span of a timeline."""
    return timeline.span if objective == "span" else timeline.makespan


def improved(
    problem: Problem,
    cost: CostModel,
    start: Iterable[Schedule],
    *,
    deadline: float,
    candidates: int | None,
    name: str,
) -> Found:
    """The best order of a problem that is found until `deadline`, a time of `perf_counter`, and within a number of
    `candidates`: list scheduling under a grid of rules; then, in turn, variations of the best rules and moves on the
    longest path of the best order.

    The result is never worse than those of `start` that keep within the memory. The search splits their backwards and
    takes their pairs apart; where they may be better as they are, they are simulated too.

    Raises UsageError for fewer than one candidate, and for a `start` of another placement, of other microbatches, or
    incomplete. Also raises it if ranks of several paths, or with slices of several stages, wait for each other in all
    orders that were tried.
    """
    if candidates is not None:
        require_positive(candidates=candidates)
    proved = bounds(problem)
    tried = 0

    def goes_on(best: ScoredOrder | None) -> bool:
        nonlocal tried
        tried += 1
        is_proved = best is not None and best.objective <= proved.objective * (1 + 1e-12)
        return not is_proved and tried <= (inf if candidates is None else candidates) and perf_counter() < deadline

    given = {schedule.rows: schedule for schedule in map(Schedule.without_reductions, start)}.values()
    builder, begin = _begun(Builder.of(problem, proved), list(given), goes_on)
    best = _searched(builder, plain_rules(builder.alike, builder.heads), begin, goes_on)
    whole = [replace(schedule, name=name) for schedule in given if _may_gain(problem, cost, schedule)]
    schedules = [to_schedule(name, _in_order(problem, best), best.sequences)] if best else []
    timed = [(schedule, simulate(schedule, cost)) for schedule in (*schedules, *whole)]
    within = [each for each in timed if keeps_within(problem, each[1])]
    if not within:
        raise UsageError(
            "ranks with stages of several paths, or with slices of several stages, wait for each other in all orders "
            "that were tried: allow more memory, or start from a schedule that keeps within it"
        )
    schedule, timeline = min(
        within,
        key=lambda each: (measured(each[1], problem.objective), each[1].makespan + each[1].span),
    )
    bound = proved.objective
    if pairing_of(cost).hides and schedule.has_pairs:
        bound = bounds(with_hidden(problem, cost)).objective
    return Found(schedule, timeline, min(bound, measured(timeline, problem.objective)), problem.objective)


def _begun(
    builder: Builder, given: Sequence[Schedule], goes_on: Callable[[ScoredOrder | None], bool]
) -> tuple[Builder, list[ScoredOrder]]:
    """A builder for the best of a few orders of the microbatches, and the best of the given schedules and first rules
    in each of them. Where microbatches are alike, there is one order, and the given schedules are as they are.
    """
    problem = builder.problem
    builders = [builder]
    if problem.factors:
        sizes = [0.0] * problem.num_microbatches
        for operation, times in enumerate(problem.each(problem.durations)):
            for place, time in zip(problem.places[operation // 3], times, strict=True):
                sizes[place] += time
        builders += [builder.in_order(order) for order in arrangements(sizes)]
    started = [[each for schedule in given if (each := _started(its.problem, schedule))] for its in builders]
    if len(builders) == 1:
        return builder, started[0]
    first = [*islice(plain_rules(builder.alike, builder.heads), FIRST)]
    best: list[ScoredOrder | None] = []
    for its, begin in zip(builders, started, strict=True):
        found = reduce(_better, begin, its.candidate(first[0]))
        for rules in first[1:]:
            if not goes_on(found):
                break
            found = _better(found, its.candidate(rules))
        best.append(found)
    _, place = min((each[:2] if each else (inf, inf), place) for place, each in enumerate(best))
    return builders[place], [*filter(None, best)]


def _in_order(problem: Problem, candidate: ScoredOrder) -> Problem:
    """The problem in the order of the microbatches of a candidate."""
    return problem.in_order(candidate.order) if candidate.order else problem


def _may_gain(problem: Problem, cost: CostModel, schedule: Schedule) -> bool:
    """Whether a schedule may become worse when its backwards are split into halves and its pairs are taken apart. This
    is so if halves keep more memory, if pairs hide time, or if links are occupied, which the search does not count. It
    is so, too, if microbatches differ, since one may overtake another in the schedule.
    """
    pairs = pairing_of(cost).hides and schedule.has_pairs
    return (
        pairs or bool(problem.factors) or bool(cost.activation_bytes or cost.route_bytes) or any(problem.memory.spare)
    )


def _started(problem: Problem, schedule: Schedule) -> ScoredOrder | None:
    """The candidate that `schedule` is; None when it does not keep within the memory."""
    if schedule.placement != problem.placement or schedule.num_microbatches != problem.num_microbatches:
        raise UsageError(f"start {schedule.name!r} has another placement or other microbatches than the search")
    if schedule.slices != problem.slices:
        raise UsageError(
            f"start {schedule.name!r} has slices={schedule.slices}, and the search has slices={problem.slices}: "
            "give both the same number"
        )
    sequences = to_sequences(schedule)
    whole = [
        [3 * stage + half for stage in stages for half in range(3) for _ in problem.places[stage]]
        for stages in problem.stages
    ]
    if any(sorted(sequence) != operations for sequence, operations in zip(sequences, whole, strict=True)):
        raise UsageError(f"start {schedule.name!r} does not run every forward and backward once; see verify()")
    if not all(fits(problem, rank, sequence) for rank, sequence in enumerate(sequences)):
        return None
    times = run_times(problem, sequences)
    if times is None:
        raise UsageError(f"start {schedule.name!r} cannot run to its end; see verify()")
    return times.candidate(problem, sequences)


def _better(one: ScoredOrder | None, other: ScoredOrder | None) -> ScoredOrder | None:
    return one if other is None or (one is not None and one[:2] <= other[:2]) else other


def _searched(
    builder: Builder,
    grid: Iterator[Rules],
    begin: Sequence[ScoredOrder],
    goes_on: Callable[[ScoredOrder | None], bool],
) -> ScoredOrder | None:
    """The best order; None if all rules lead to none, and nothing is begun with."""
    first = next(grid)
    candidate = builder.candidate(first)
    # the best of the rules without a slack, and of those with one
    found = {first.slack is None: (candidate, first)} if candidate else {}
    best = reduce(_better, begin, candidate)
    for rules in grid:
        if not goes_on(best):
            return best
        same = found.get(rules.slack is None)
        candidate = builder.candidate(rules, same[0].objective if same else inf)
        if candidate is not None and (same is None or _better(same[0], candidate) is candidate):
            found[rules.slack is None] = candidate, rules
            best = _better(best, candidate)
    if best is None:
        return None
    random = Random(0)
    near = [each for each in found.values() if each[0].objective <= NEAR * best.objective]
    by_rules = [_rule_climb(builder, *each, random) for each in near]
    orders = {
        each.order: each for each in begin if each.objective <= NEAR * best.objective and each.order != best.order
    }
    while True:
        by_moves = [_move_climb(builder.problem, each, random) for each in (best, *orders.values())]
        for climb in (*by_rules, *by_moves) * ROUND:
            if not goes_on(best):
                return best
            best = _better(best, climb()) or best


def longest(objective: float, random: Random) -> float:
    """The objective up to which a climb goes on from a candidate with this one: mostly hardly longer, now and then
    much.
    """
    return objective * (1 + SLACK / 2 * random.expovariate(1) ** 2)


Climb = Callable[[], ScoredOrder | None]


def _rule_climb(builder: Builder, current: ScoredOrder, rules: Rules, random: Random) -> Climb:
    """Varies rules, and goes on from those whose candidate is hardly worse."""

    def climb() -> ScoredOrder | None:
        nonlocal current, rules
        tried = varied(rules, builder.alike, random)
        if random.random() < 0.3:
            tried = varied(tried, builder.alike, random)
        most = longest(current.objective, random)
        candidate = builder.candidate(tried, most)
        if candidate is not None and candidate.objective <= most:
            current, rules = candidate, tried
        return candidate

    return climb


def _move_climb(problem: Problem, current: ScoredOrder, random: Random) -> Climb:
    """Moves operations of an order, and goes on from orders that are hardly worse."""
    problem = _in_order(problem, current)
    times = run_times(problem, current.sequences)
    assert times is not None  # it ran
    blocks = critical_blocks(problem, current.sequences, times)

    def climb() -> ScoredOrder | None:
        nonlocal problem, current, blocks
        for _ in range(PROPOSALS if blocks else 0):
            its, sequences = problem, neighbour(problem, current.sequences, blocks, random)
            if problem.factors and random.random() < EXCHANGED:
                its, sequences = exchanged(problem, current.sequences, random)
            if sequences is not None and (times := run_times(its, sequences)) is not None:
                candidate = times.candidate(its, sequences)
                if candidate.objective <= longest(current.objective, random):
                    problem, current, blocks = its, candidate, critical_blocks(its, sequences, times)
                return candidate
        return None

    return climb


def fits(problem: Problem, rank: int, sequence: Operations) -> bool:
    """Whether a rank's sequence keeps within its memory, every F precedes its I and that its W, and slices come in
    order.
    """
    memory, room, factors, before = problem.memory, problem.memory.room[rank], problem.factors, problem.before
    kept, done = 0.0, [*(0 for _ in problem.source), NONE]  # the last: of an operation that has none before it
    for operation in sequence:
        begins, ends = memory.at_start[operation], memory.at_end[operation]
        if factors:
            factor = factors[operation // 3][done[operation]]
            begins, ends = begins * factor, ends * factor
        done[operation] += 1
        most = kept + begins
        kept = most + ends
        early = (operation % 3 and done[operation] > done[operation - 1]) or done[operation] > done[before[operation]]
        if early or max(most, kept) > room:
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


def exchanged(
    problem: Problem, sequences: Sequence[Operations], random: Random
) -> tuple[Problem, list[Operations] | None]:
    """The problem with two places of its microbatches exchanged, and `sequences` in it; None where these keep too much
    then.
    """
    order = [*(problem.order or range(problem.num_microbatches))]
    one, other = random.choices(range(len(order)), k=2)
    order[one], order[other] = order[other], order[one]
    changed = problem.in_order(order)
    sound = one != other and all(fits(changed, rank, sequence) for rank, sequence in enumerate(sequences))
    return changed, [*sequences] if sound else None
