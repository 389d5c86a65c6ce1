"""Processors: when every action would run on ranks that share fewer processors than they are. Must not contain: costs,
and the order in which actions can run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import NamedTuple

from pipeflow.analysis.order import Order, Turn
from pipeflow.analysis.simulate import require_costs, require_end, transfers
from pipeflow.core.action import Action
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.route import routes_among
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Span
from pipeflow.core.timeline import Timeline


def simulate_shared(schedule: Schedule, cost: CostModel, processors: float) -> Timeline:
    """The timeline of `schedule` under `cost` on ranks that share `processors`, such as processes on the cores of one
    machine. Whatever runs at the same time gets the same share of them, and never more than one processor. The times of
    `cost` are those of a rank that has a processor alone; transfers need none. All else is as in `simulate`.

    Raises ScheduleError and UsageError as `simulate` does.
    """
    return _Run(schedule, cost, processors).timeline()


class _Task(NamedTuple):
    """A turn that runs: it ends when each task has had `end` seconds of a processor, counted from the start."""

    end: float
    number: int
    turn: Turn
    start: float


class _Run:
    """One run. Times of tasks are in seconds of a processor that each running task has had: since all have the same
    share, they end in the order of these times, whoever starts or ends meanwhile.
    """

    def __init__(self, schedule: Schedule, cost: CostModel, processors: float) -> None:
        require_costs(schedule, cost)
        self._schedule, self._cost, self._processors = schedule, cost, processors
        order = Order(schedule, routes_among(schedule.placement.num_stages, cost.route_bytes))
        self._turns: list[deque[Turn]] = [deque() for _ in schedule.rows]
        for turn in order:
            self._turns[turn.rank].append(turn)
        require_end(schedule, order)
        self._transfers = [each for end in order.ends for each in transfers(schedule, cost, end)]
        self._there = [inf] * len(self._transfers)  # per value, when it is there for its user
        self._left: defaultdict[tuple[int, int], float] = defaultdict(float)  # per link, when its last value has left
        self._now = self._had = 0.0  # seconds, and seconds of a processor
        self._running: list[_Task] = []
        self._number = 0
        self._looks: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(schedule.rows))]
        self._busy: set[tuple[int, Stream]] = set()
        self._reached: list[Turn] = []  # turns beside the computations that have not started
        self._spans: list[list[Span]] = [[] for _ in schedule.rows]

    def timeline(self) -> Timeline:
        """Runs to the end."""
        while self._running or self._looks:
            share = min(1.0, self._processors / len(self._running)) if self._running else 1.0
            ends = self._now + (self._running[0].end - self._had) / share if self._running else inf
            if self._looks and self._looks[0][0] <= ends:
                time, rank = heappop(self._looks)
                self._pass(max(time, self._now), share)
                self._proceed(rank)
            else:
                self._pass(ends, share)
                self._had = max(self._had, self._running[0].end)
                self._end(heappop(self._running))
        rows = (sorted(row, key=attrgetter("start")) for row in self._spans)
        return Timeline.of(self._schedule, tuple(map(tuple, rows)), self._cost)

    def _pass(self, now: float, share: float) -> None:
        self._had += (now - self._now) * share
        self._now = now

    def _proceed(self, rank: int) -> None:
        """Starts what the rank can start. What its next turn waits for lets it look again."""
        turns = self._turns[rank]
        while turns and (rank, Stream.COMPUTE) not in self._busy:
            turn = turns[0]
            latest = max((self._there[value] for value in turn.needs), default=0.0)
            if latest > self._now:
                if latest < inf:
                    heappush(self._looks, (latest, rank))
                return
            turns.popleft()
            for value in turn.needs:
                self._there[value] = inf
            if _stream(turn) is Stream.COMPUTE:
                self._start(turn)
            else:
                self._reached.append(turn)
                self._start_beside()

    def _start_beside(self) -> None:
        """Starts what all ranks that take part have reached, where their streams are free."""
        for turn in tuple(self._reached):
            [action] = turn.actions
            flow = DATAFLOW[action.kind]
            ranks = self._schedule.placement.ranks_of(action.stage) if flow.joint else (turn.rank,)
            parts = [each for each in self._reached if _same(each.actions[0], action) and each.rank in ranks]
            is_free = not any((rank, flow.stream) in self._busy for rank in ranks)
            if turn in self._reached and is_free and (len(parts) == len(ranks) or not flow.joint):
                for part in parts if flow.joint else (turn,):
                    self._reached.remove(part)
                    self._start(part)

    def _start(self, turn: Turn) -> None:
        if len(turn.actions) == 1:
            [action] = turn.actions
            seconds = self._cost.duration(action.kind, action.stage)
        else:
            forward, backward = turn.actions
            seconds = self._cost.pair(forward.stage, backward.kind, backward.stage)
        self._busy.add((turn.rank, _stream(turn)))
        self._number += 1
        heappush(self._running, _Task(self._had + seconds, self._number, turn, self._now))

    def _end(self, task: _Task) -> None:
        turn, rank = task.turn, task.turn.rank
        self._busy.remove((rank, _stream(turn)))
        self._spans[rank] += self._spans_of(task)
        looking = {rank}
        for value in turn.makes:
            transfer = self._transfers[value]
            there = self._now
            if transfer.held:
                there = self._left[transfer.link] = max(self._left[transfer.link], there) + transfer.held
            self._there[value] = there + transfer.latency
            looking.add(transfer.link[1])
        for each in sorted(looking):
            self._proceed(each)
        self._start_beside()

    def _spans_of(self, task: _Task) -> list[Span]:
        """One span, or two for a pair, in the proportion of the times that they take alone."""
        rank, actions = task.turn.rank, task.turn.actions
        if len(actions) == 1:
            return [Span(actions[0], rank, task.start, self._now)]
        forward, backward = actions
        first, second = (self._cost.duration(each.kind, each.stage) for each in actions)
        share = first / (first + second) if first + second else 0.0
        middle = task.start + (self._now - task.start) * share
        return [Span(forward, rank, task.start, middle, backward), Span(backward, rank, middle, self._now, forward)]


def _stream(turn: Turn) -> Stream:
    return DATAFLOW[turn.actions[0].kind].stream


def _same(one: Action, other: Action) -> bool:
    return (one.kind, one.stage) == (other.kind, other.stage)
