"""Simulate against a slow simulator of its own, written from the definitions, over random sound schedules: pairs, split
backwards, both directions, reductions, unequal costs, links and bytes. Costs are multiples of 1/4, so that sums are
exact.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest

from pipeflow.core.action import Action, Entry, Kind, Pair, actions_of
from pipeflow.core.analysis.idle_time import critical_path
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, Link
from pipeflow.core.dataflow import Stream
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Timeline

seeds = pytest.mark.parametrize("seed", range(40))


def random_placement(draw: random.Random) -> Placement:
    ranks = draw.randint(1, 4)
    anywhere = [*range(ranks), *(draw.randrange(ranks) for _ in range(3))]
    draw.shuffle(anywhere)
    return draw.choice(
        [
            Placement.linear(ranks),
            Placement.looped(ranks, draw.randint(1, 3)),
            Placement.vee(ranks),
            Placement.bidirectional(ranks),
            Placement((tuple(anywhere),)),
        ]
    )


def befores(action: Action, stages: int) -> list[set[Action]]:
    """What must have run before: one of each set."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.W:
        return [{Action(Kind.I, stage, microbatch)}]
    if action.kind is Kind.F:
        return [{Action(Kind.F, stage - 1, microbatch)}] if stage else []
    later = [{Action(kind, stage + 1, microbatch) for kind in (Kind.B, Kind.I)}] if stage + 1 < stages else []
    return [*later, {Action(Kind.F, stage, microbatch)}]


def random_schedule(draw: random.Random) -> Schedule:
    """Whatever can run next, at random; at times a forward and a backward of one rank as a pair."""
    placement = random_placement(draw)
    stages, microbatches = placement.num_stages, draw.randint(1, 4)
    kinds: list[tuple[Kind, ...]] = [(Kind.B,), (Kind.I, Kind.W)]
    if draw.random() < 0.1:
        kinds = [()]
    left = [
        Action(kind, stage, microbatch)
        for stage in range(stages)
        for microbatch in range(microbatches)
        for kind in (Kind.F, *draw.choice(kinds))
    ]
    done: set[Action] = set()
    rows: list[list[Entry]] = [[] for _ in range(placement.num_ranks)]
    while left:
        ready = [action for action in left if all(done & one for one in befores(action, stages))]
        entry: Entry = (chosen := draw.choice(ready))
        rank = placement.rank_of(chosen.stage, chosen.microbatch)
        forwards = [
            each for each in ready if each.kind is Kind.F and placement.rank_of(each.stage, each.microbatch) == rank
        ]
        if chosen.kind in (Kind.B, Kind.I) and forwards and draw.random() < 0.9:
            entry = Pair(draw.choice(forwards), chosen)
        rows[rank].append(entry)
        done |= set(actions_of(entry))
        left = [action for action in left if action not in done]
    schedule = Schedule("random", placement, microbatches, tuple(map(tuple, rows)))
    return late(draw, schedule.with_reductions()) if draw.random() < 0.6 else schedule


def late(draw: random.Random, schedule: Schedule) -> Schedule:
    """With reductions put off at random."""
    rows = []
    for row in schedule.rows:
        order = list(row)
        for entry in [each for each in row if isinstance(each, Action) and each.kind is Kind.R]:
            place = draw.randint(order.index(entry), len(order) - 1)
            order.remove(entry)
            order.insert(place, entry)
        rows.append(tuple(order))
    return replace(schedule, rows=tuple(rows))


def random_cost(draw: random.Random, placement: Placement) -> CostModel:
    def numbers(largest: int) -> tuple[float, ...]:
        return tuple(draw.randint(1, 4 * largest) / 4 for _ in range(placement.num_stages))

    ranks = range(placement.num_ranks)
    return CostModel(
        numbers(2),
        numbers(2),
        numbers(2),
        latency=draw.choice([0, 0.5, 3]),
        bandwidth=draw.choice([1, 4]),
        activation_bytes=numbers(3),
        links={(one, two): Link(draw.randint(0, 9) / 2, 2) for one in ranks for two in ranks if draw.random() < 0.4},
        overlap=draw.choice([0, 0.5, 1]),
        saved_bytes=numbers(9),
        deferred_bytes=numbers(4),
        reduce=numbers(9),
        exchange=tuple(draw.randint(0, 4) / 4 for _ in range(placement.num_stages)) if draw.random() < 0.5 else (),
    )


def users(action: Action) -> set[tuple[Kind, int]]:
    """Who on other stages may use what `action` makes."""
    match action.kind:
        case Kind.F:
            return {(Kind.F, action.stage + 1)}
        case Kind.B | Kind.I if action.stage:
            return {(Kind.B, action.stage - 1), (Kind.I, action.stage - 1)}
        case _:
            return set()


class Times(NamedTuple):
    start: float
    end: float


class Slow:
    """Starts and ends of every entry, put off until nothing that it waits for comes later."""

    def __init__(self, schedule: Schedule, cost: CostModel) -> None:
        self.schedule, self.cost = schedule.without_reductions(), cost
        self.stages = schedule.placement.num_stages
        self.at = {
            action: (rank, position)
            for rank, row in enumerate(self.schedule.rows)
            for position, entry in enumerate(row)
            for action in actions_of(entry)
        }
        self.times = {place: Times(0, self.duration(place)) for place in self.at.values()}
        while sum(self.put_off(place) for place in self.times):
            pass

    def entry(self, place: tuple[int, int]) -> Entry:
        return self.schedule.rows[place[0]][place[1]]

    def duration(self, place: tuple[int, int]) -> float:
        actions = actions_of(self.entry(place))
        if len(actions) == 1:
            return self.alone(actions[0])
        whole = [self.alone(action) for action in actions]
        exchanged = [self.exchanged(action) for action in actions]
        computed = [one - other for one, other in zip(whole, exchanged, strict=True)]
        return max(sum(computed) - self.cost.overlap * min(computed), sum(exchanged), *whole)

    def exchanged(self, action: Action) -> float:
        share = self.cost.exchange[action.stage] if self.cost.exchange else 0
        whole = self.alone(replace(action, kind=Kind.F if action.kind is Kind.F else Kind.B))
        return min(share * whole, self.alone(action))

    def alone(self, action: Action) -> float:
        forward, inputs, weights = (
            each[action.stage] for each in (self.cost.forward, self.cost.backward_input, self.cost.backward_weight)
        )
        return {Kind.F: forward, Kind.B: inputs + weights, Kind.I: inputs, Kind.W: weights}[action.kind]

    def put_off(self, place: tuple[int, int]) -> bool:
        earliest = max([0.0, *(time for _, time in self.waits(place))])
        late = earliest > self.times[place].start
        if late:
            self.times[place] = Times(earliest, earliest + self.duration(place))
        return late

    def waits(self, place: tuple[int, int]) -> list[tuple[tuple[int, int], float]]:
        """What the entry at `place` waits for, and until when."""
        rank, position = place
        waits = [((rank, position - 1), self.times[rank, position - 1].end)] if position else []
        for action in actions_of(self.entry(place)):
            for before in set().union(*befores(action, self.stages)) & set(self.at):
                there = self.at[before]
                waits.append((there, self.arrival(before, rank)))
        return waits

    def arrival(self, made: Action, receiver: int) -> float:
        """When what `made` makes is on `receiver`: behind all that its rank sent there before."""
        sender, position = self.at[made]
        if sender == receiver:
            return self.times[sender, position].end
        link = self.cost.links.get((sender, receiver), Link(self.cost.latency, self.cost.bandwidth))
        left = 0.0
        for action in (each for entry in self.schedule.rows[sender][: position + 1] for each in actions_of(entry)):
            for user in self.at.keys() & {Action(kind, stage, action.microbatch) for kind, stage in users(action)}:
                if self.at[user][0] == receiver:
                    size = self.cost.activation_bytes[min(action.stage, user.stage)]
                    left = max(left, self.times[self.at[action]].end) + size / link.bandwidth
            if action == made:
                break
        return left + link.latency

    def kept(self, rank: int) -> list[tuple[float, float, float]]:
        """What the rank's forwards and input-gradient halves keep: from when to when, and how much."""
        pieces = []
        trained = any(action.kind is not Kind.F for action in self.schedule.actions(rank))
        for action in self.schedule.actions(rank):
            stage, microbatch = action.stage, action.microbatch
            times = {kind: self.times.get(self.at.get(Action(kind, stage, microbatch), (-1, -1))) for kind in Kind}
            if action.kind is Kind.F:
                last = (times[Kind.B] or times[Kind.I]) if trained else times[Kind.F]
                assert last is not None
                pieces.append((self.times[self.at[action]].start, last.end, self.cost.saved_bytes[stage]))
            if action.kind is Kind.W and (half := times[Kind.I]) is not None:
                pieces.append((half.end, self.times[self.at[action]].end, self.cost.deferred_bytes[stage]))
        return pieces


@cache
def drawn(seed: int) -> tuple[Schedule, CostModel]:
    draw = random.Random(seed)
    schedule = random_schedule(draw)
    assert verify(schedule) == []
    return schedule, random_cost(draw, schedule.placement)


@cache
def ran(seed: int) -> tuple[Slow, Timeline]:
    """What was drawn, as the two simulators run it."""
    return Slow(*drawn(seed)), simulate(*drawn(seed))


@seeds
def test_times_are_those_of_the_definition(seed: int) -> None:
    slow, fast = ran(seed)
    spans = {span.action: span for row in fast.on(Stream.COMPUTE) for span in row}
    assert set(spans) == set(slow.at)
    for action, place in slow.at.items():
        first, *_, last = (spans[each] for each in actions_of(slow.entry(place)) * 2)
        assert (first.start, last.end) == slow.times[place], action
    ends = [
        *(times.end for times in slow.times.values()),
        *(span.end for row in fast.on(Stream.REDUCE) for span in row),
    ]
    assert fast.makespan == max(ends)


@seeds
def test_reductions_are_served_as_their_ranks_come_to_them(seed: int) -> None:
    schedule, cost = drawn(seed)
    slow, fast = ran(seed)
    spans = {span.action: span for row in fast.on(Stream.REDUCE) for span in row}
    came: dict[Action, float] = {}
    for rank, row in enumerate(schedule.rows):
        ends = [0.0]
        for entry in row:
            if isinstance(entry, Action) and entry.kind is Kind.R:
                came[entry] = ends[-1]
            else:
                ends.append(slow.times[rank, len(ends) - 1].end)
        assert {span.action for span in fast.on(Stream.REDUCE)[rank]} == {action for action in row if action in came}
    assert set(spans) == set(came)
    for action, span in spans.items():
        together = [other for other in spans.values() if other.action.stage == action.stage]
        assert {(other.start, other.end) for other in together} == {
            (span.start, span.start + cost.reduce[action.stage])
        }
        ready = max(came[other.action] for other in together)
        before = [other for part in together for other in fast.on(Stream.REDUCE)[part.rank] if other.start < span.start]
        assert span.start == max([ready, *(other.end for other in before)])
        for other in before:
            parts = [each.action for each in spans.values() if each.action.stage == other.action.stage]
            assert max(came[each] for each in parts) <= ready


@seeds
def test_memory_is_that_of_the_definition(seed: int) -> None:
    slow, fast = ran(seed)
    moments = {moment for times in slow.times.values() for moment in times}
    for rank in range(len(fast.rows)):
        curve, pieces = fast.memory(rank), slow.kept(rank)
        kept = {moment: sum(held * (start <= moment < end) for start, end, held in pieces) for moment in moments}
        assert {time for time, _ in curve} <= moments
        for moment, amount in kept.items():
            assert [held for time, held in [(-1.0, 0.0), *curve] if time <= moment][-1] == amount
        assert fast.peak_bytes[rank] == max(kept.values())


@seeds
def test_the_critical_path_is_a_chain_of_waits_as_long_as_the_makespan(seed: int) -> None:
    slow, fast = ran(seed)
    path = [cause for cause in critical_path(fast) if cause.span.action.kind is not Kind.R]
    reduced = critical_path(fast)[len(path) :]
    assert all(cause.after and cause.after.end == cause.span.start for cause in reduced)
    places = [slow.at[cause.span.action] for cause in path]
    assert path[0].after is None
    assert [*path, *reduced][-1].span.end == fast.makespan
    length = slow.times[places[0]].end
    for before, after in pairwise(places):
        if before != after:  # the two halves of a pair
            assert (before, slow.times[after].start) in slow.waits(after)
            length += slow.times[after].end - slow.times[before].end
    assert length + sum(cause.span.end - cause.span.start for cause in reduced) == fast.makespan
    for cause, later in pairwise([*path, *reduced]):
        assert later.after == cause.span
        assert (later.value is None) == (cause.span.rank == later.span.rank)


def test_random_plans_have_all_that_there_is() -> None:
    schedules = [drawn(seed)[0] for seed in range(40)]
    assert any(schedule.is_forward_only for schedule in schedules)
    assert any(len(schedule.placement.paths) == 2 for schedule in schedules)
    entries = [entry for schedule in schedules for row in schedule.rows for entry in row]
    assert sum(isinstance(entry, Pair) for entry in entries) > 30
    assert any(ran(seed)[1].exposed == 0 for seed in range(40))
    assert {action.kind for entry in entries for action in actions_of(entry)} == {*"FBIWR"}
