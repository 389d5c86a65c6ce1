"""Processors: the clock of ranks that share something, processors or links to their hosts. It goes forward in time.
Must not contain: the order in which actions can run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from pipeflow.analysis.event_loop import Ran, Transfer, paired
from pipeflow.analysis.order import Turn
from pipeflow.core.action import Action
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import COPIES, DATAFLOW, Stream
from pipeflow.core.schedule import Schedule


class _Task(NamedTuple):
    """A turn that runs. It ends when each running task has had `end` seconds of a processor since the start of the
    simulation.
    """

    end: float
    number: int
    turn: Turn
    start: float


@dataclass(slots=True, eq=False)
class _Reached:
    """A turn beside the computations that its rank has reached and that has not started, with the values that are not
    there yet.
    """

    turn: Turn
    awaited: list[int]

    def runs(self, action: Action) -> bool:
        [mine] = self.turn.actions
        return (mine.kind, mine.stage) == (action.kind, action.stage)


class SharedClock:
    """The clock of ranks that share processors, and whose copies share the links of `cost.copy_groups`. Times of tasks
    are in seconds of a processor that each running task has had: since all have the same share, they end in the order
    of these times, even if other tasks start or end meanwhile.
    """

    def __init__(
        self,
        schedule: Schedule,
        cost: CostModel,
        processors: float,
        turns: Iterable[Turn],
        there: list[float],
        moved: Sequence[Transfer],
    ) -> None:
        self._placement, self._cost, self._processors = schedule.placement, cost, processors
        self._turns: list[deque[Turn]] = [deque() for _ in schedule.rows]
        for turn in turns:
            self._turns[turn.rank].append(turn)
        self._there, self._moved = there, moved
        self._link = {rank: group[0] for group in cost.copy_groups for rank in group}  # which rank it is called after
        self._now = self._had = 0.0  # seconds, and seconds of a processor
        self._running: list[_Task] = []
        self._number = 0
        self._looks: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(schedule.rows))]
        self._busy: set[tuple[int, Stream]] = set()  # by rank, or by link for copies
        self._reached: list[_Reached] = []

    def __iter__(self) -> Iterator[Ran]:
        while self._running or self._looks:
            share = min(1.0, self._processors / len(self._running)) if self._running else 1.0
            ends = self._now + (self._running[0].end - self._had) / share if self._running else inf
            if self._looks and self._looks[0][0] <= ends:
                time, rank = heappop(self._looks)
                self._pass(max(time, self._now), share)
                self._proceed(rank)
                continue
            self._pass(ends, share)
            self._had = max(self._had, self._running[0].end)
            task = heappop(self._running)
            yield self._ended(task)
            for rank in sorted({task.turn.rank, *(self._moved[value].link[1] for value in task.turn.makes)}):
                self._proceed(rank)
            self._start_beside()

    def _pass(self, now: float, share: float) -> None:
        self._had += (now - self._now) * share
        self._now = now

    def _proceed(self, rank: int) -> None:
        """Starts the turns that the rank can start. It is called again when the next turn can start."""
        turns = self._turns[rank]
        while turns and (rank, Stream.COMPUTE) not in self._busy:
            turn = turns[0]
            if _stream(turn) is not Stream.COMPUTE:
                self._reached.append(_Reached(turns.popleft(), turn.needs))
                self._start_beside()
                continue
            latest = max((self._there[value] for value in turn.needs), default=0.0)
            if latest > self._now:
                if latest < inf:
                    heappush(self._looks, (latest, rank))
                return
            self._take(turn.needs)
            self._start(turns.popleft())

    def _take(self, values: Iterable[int]) -> list[int]:
        """Uses up those of `values` that are there, until they are made again, and returns the others."""
        left = []
        for value in values:
            if self._there[value] > self._now:
                left.append(value)
            else:
                self._there[value] = inf
        return left

    def _lane(self, rank: int, stream: Stream) -> tuple[int, Stream]:
        """The resource that a rank occupies while an action runs on a stream."""
        return (self._link.get(rank, rank) if stream in COPIES else rank), stream

    def _start_beside(self) -> None:
        """Starts the actions beside the computations whose values are there and whose streams are free, and that all
        their ranks have reached if they are joint. Those that were reached first come first, and no action comes before
        an earlier one of its rank and stream.
        """
        waiting: set[tuple[int, Stream]] = set()
        for reached in self._reached.copy():
            turn = reached.turn
            [action] = turn.actions
            flow = DATAFLOW[action.kind]
            reached.awaited = self._take(reached.awaited)
            if reached.awaited or (turn.rank, flow.stream) in waiting:
                waiting.add((turn.rank, flow.stream))
                continue
            ranks = self._placement.ranks_of(action.stage) if flow.joint else (turn.rank,)
            parts = [each for each in self._reached if each.turn.rank in ranks and each.runs(action)]
            is_free = not any(self._lane(rank, flow.stream) in self._busy for rank in ranks)
            if reached in self._reached and is_free and (len(parts) == len(ranks) or not flow.joint):
                for part in parts if flow.joint else (reached,):
                    self._reached.remove(part)
                    self._start(part.turn)

    def _start(self, turn: Turn) -> None:
        seconds, *others = self._times(turn)
        for other in others:
            seconds, _ = paired(seconds, other, self._cost.overlap)
        self._busy.add(self._lane(turn.rank, _stream(turn)))
        self._number += 1
        heappush(self._running, _Task(self._had + seconds, self._number, turn, self._now))

    def _ended(self, task: _Task) -> Ran:
        """A pair is divided in proportion to the times that its actions take alone."""
        turn, start = task.turn, task.start
        self._busy.remove(self._lane(turn.rank, _stream(turn)))
        if len(turn.actions) == 1:
            return turn, start, self._now, self._now
        first, second = self._times(turn)
        share = first / (first + second) if first + second else 0.0
        return turn, start, self._now, start + (self._now - start) * share

    def _times(self, turn: Turn) -> list[float]:
        """The time that each action of a turn takes alone."""
        return [self._cost.duration(action.kind, action.stage, action.microbatch) for action in turn.actions]


def _stream(turn: Turn) -> Stream:
    return DATAFLOW[turn.actions[0].kind].stream
