"""Simulate: when every action would run; of a schedule that may be unsound, as far as it runs. An action starts when
its values have arrived and its stream is free.

All simulations have one loop. A clock is an iterator over turns with their starts and ends. The loop takes each turn
that has ended, writes its spans, and sets the times when its values arrive at their users. The clock reads these times
when it continues. `unlimited` is the clock of ranks that share nothing. `SharedClock` goes forward in time, for ranks
that share processors or links to their hosts. Must not contain: costs, and the order in which actions can run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import NamedTuple, final

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.analysis.in_time import BESIDE, in_time, work_of
from pipeflow.core.analysis.order import Order, Stuck, Turn
from pipeflow.core.cost import CostModel, pairing_of, require_cost_model, require_ends, slice_lengths, slice_works
from pipeflow.core.dataflow import COPIES, DATAFLOW, SEVERAL, End, Stream
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.factors import require_factors
from pipeflow.core.pairing import Pairing
from pipeflow.core.route import Route, routes_among
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.timeline import Row, Span, Timeline


def simulate(schedule: Schedule, cost: CostModel | None = None) -> Timeline:
    """The timeline of `schedule` under `cost`.

    Transfers: a value from another rank arrives one transfer after the action that made it ends. Transfers overlap with
    computation, and with transfers on other links. Values occupy a link one after the other, and the latency of a value
    overlaps with the next value. An action waits for a value on a route only if the costs have its size.

    Backwards and pairs: another rank gets the gradient of a full backward only when the whole backward has ended. A
    pair starts when both of its actions have their values, and takes the time of `CostModel.pair`. Other ranks get its
    values when both actions have ended. To run pairs one action after the other, simulate `schedule.without_pairs()`.

    Reductions run beside computations. A reduction starts when all ranks that hold the stage have reached it, have its
    values, and have a free stream. It does not hold up its rank. The step ends when everything has ended.

    Copies to and from the host also run beside computations, in each direction one after the other. Ranks that share a
    link (`CostModel.copy_groups`) take turns in the order in which they reach their copies.

    Args:
        schedule: the schedule.
        cost: the costs. None: 1 for F, 1 for each half of a backward, and free transfers.

    Raises ScheduleError if the schedule cannot run to its end (`verify` says why), and UsageError for costs with
    another number of stages or microbatches.
    """
    require_schedule(schedule)
    return simulate_shared(schedule, CostModel.even(schedule.placement) if cost is None else cost, inf)


def simulate_shared(schedule: Schedule, cost: CostModel, processors: float, within: float = inf) -> Timeline:
    """The timeline of `schedule` under `cost` on ranks that share `processors`, such as processes on the cores of one
    machine. Whatever runs at the same time gets the same share of them, and never more than one processor. The times of
    `cost` are those of a rank that has a processor alone; transfers need none. All else is as in `simulate`.

    Raises ScheduleError and UsageError as `simulate` does, and LateError as soon as it is known that the computations
    take longer than `within`.
    """
    require_costs(schedule, cost)
    rows, order = run(schedule, cost, processors, within)
    require_end(schedule, order)
    return Timeline.of(schedule, rows, cost)


def run(
    schedule: Schedule, cost: CostModel, processors: float = inf, within: float = inf
) -> tuple[tuple[Row, ...], Order]:
    """Per rank its spans in the order of their starts, as far as `schedule` runs; and its order, which says where ranks
    are stuck. Raises ScheduleError as `Order` does, and LateError as `in_time`.
    """
    order = Order(schedule, routes_among(schedule.placement.num_stages, cost.route_bytes))
    moved = transfers(schedule, cost, order)
    there, varied, pairing = [inf] * len(moved), _varied(schedule, cost), pairing_of(cost)
    clock: Iterable[Ran] = unlimited(order, there, cost.durations, pairing, varied)
    if processors < inf or (cost.copy_groups and schedule.streams & COPIES) or _waits_for_joint(schedule):
        clock = SharedClock(schedule, cost, processors, order, there, moved)
    if within < inf:
        clock = in_time(clock, work_of(schedule, cost.durations, varied, pairing), within)
    return loop(clock, there, moved, len(schedule.rows)), order


Part = tuple[int, int | None]
"""A microbatch, and its slice."""


def _varied(schedule: Schedule, cost: CostModel) -> dict[Part, Durations]:
    """The durations of each microbatch or slice that differs from those of a whole, usual microbatch."""
    usual, varied = cost.durations, cost.varied
    if schedule.slices == 1:
        return {(microbatch, None): table for microbatch, table in varied.items()}
    works = slice_works(cost, schedule.slices)
    tables: dict[tuple[int, int], Durations] = {}  # of equal tables of microbatches
    found: dict[Part, Durations] = {}
    for microbatch in range(schedule.num_microbatches):
        whole = varied.get(microbatch, usual)
        for part, work in enumerate(works):
            if (id(whole), part) not in tables:
                tables[id(whole), part] = {
                    kind: times if kind in SEVERAL else tuple(time * work for time in times)
                    for kind, times in whole.items()
                }
            found[microbatch, part] = tables[id(whole), part]
    return found


def _waits_for_joint(schedule: Schedule) -> bool:
    """Whether a computation waits for what a joint action on another stream makes."""
    flows = [DATAFLOW[kind] for kind in schedule.kinds]
    made = {content for flow in flows if flow.joint for content, _ in flow.makes}
    return any(content in made for flow in flows if flow.stream is Stream.COMPUTE for content, _ in flow.needs)


def require_costs(schedule: Schedule, cost: CostModel) -> None:
    """Raises UsageError for costs with another number of stages or microbatches than the schedule."""
    require_cost_model(cost)
    stages = schedule.placement.num_stages
    if len(cost.forward) != stages:
        raise UsageError(
            f"the cost model has {len(cost.forward)} stages, schedule {schedule.name!r} has {stages}: give one cost "
            "per stage, as CostModel.even(schedule.placement) does"
        )
    require_factors(cost.microbatch_factors, schedule.num_microbatches)
    require_ends(cost.slice_ends, schedule.slices)


def require_end(schedule: Schedule, order: Order) -> None:
    """Raises ScheduleError if the iteration over `order` ended before the rows of the schedule."""
    if order.stuck:
        entries = ", ".join(f"rank {rank} at {schedule.rows[rank][position]}" for rank, position in order.stuck[:8])
        raise ScheduleError(
            f"schedule {schedule.name!r} cannot run to its end: these ranks are stuck: {entries}; see verify()"
        )


@final
@dataclass(frozen=True)
class Draft:
    """The timeline of a schedule that may be unsound.

    Attributes:
        timeline: the simulation as far as it goes. After its end, it has for each rank the actions that cannot run, in
            the order of the row.
        places: per rank and span of `timeline`, the index of the entry in the rank's row.
        stuck: where ranks wait for ever: the entries of `Order.stuck`, and the first action that belongs on another
            rank.
    """

    timeline: Timeline
    places: tuple[tuple[int, ...], ...]
    stuck: tuple[Stuck, ...]

    def first_stuck(self, rank: int) -> int | None:
        """The index of the first span of `rank` that does not run; None if all run."""
        position = next((each.position for each in self.stuck if each.rank == rank), None)
        return None if position is None else self.places[rank].index(position)


def draft(schedule: Schedule, cost: CostModel) -> Draft:
    """Draws up any schedule. A rank stops at the first action that does not exist or whose stage it does not hold. The
    other ranks stop where they wait for a value that this rank does not make. For a sound schedule the timeline is that
    of `simulate`.

    Raises UsageError for costs with another number of stages.
    """
    require_costs(schedule, cost)
    own = tuple(tuple(_own(schedule, rank)) for rank in range(len(schedule.rows)))
    rows, order = run(replace(schedule, rows=own), cost)
    waiting = {each.rank: each for each in order.waiting}
    foreign = {
        rank: Stuck(rank, len(mine), None)
        for rank, (mine, row) in enumerate(zip(own, schedule.rows, strict=True))
        if len(mine) < len(row)
    }
    stuck = dict(sorted((foreign | waiting).items()))
    end = max((span.end for row in rows for span in row), default=0.0)
    behind = _behind(schedule, {each.rank: each.position for each in stuck.values()}, end, cost)
    rows = tuple((*row, *more) for row, more in zip(rows, behind, strict=True))
    places = tuple(tuple(_places(*each)) for each in zip(rows, schedule.rows, strict=True))
    return Draft(Timeline.of(schedule, rows, cost), places, tuple(stuck.values()))


def _own(schedule: Schedule, rank: int) -> Iterator[Entry]:
    """The entries of a row before the first that its rank cannot run."""
    stages, paths = schedule.placement.num_stages, schedule.placement.paths
    for entry in schedule.rows[rank]:
        for action in actions_of(entry):
            if action.stage >= stages or action.microbatch >= schedule.num_microbatches:
                return
            if paths[action.microbatch % len(paths)][action.stage] != rank:
                return
        yield entry


def _behind(schedule: Schedule, positions: Mapping[int, int], time: float, cost: CostModel) -> tuple[Row, ...]:
    """Per rank the spans of its entries from its position on: they begin at `time`, wait for no values and for no other
    ranks. An action of a stage that does not exist takes the time of the last stage.
    """
    turns = [
        Turn(rank, actions_of(entry), [], [])
        for rank, position in positions.items()
        for entry in schedule.rows[rank][position:]
    ]
    stages, last = {action.stage for turn in turns for action in turn.actions}, len(cost.forward) - 1
    durations = {kind: {stage: times[min(stage, last)] for stage in stages} for kind, times in cost.durations.items()}
    clock = unlimited(turns, [], durations, pairing_of(cost), joint=False, begin=time)
    return loop(clock, [], [], len(schedule.rows))


def _places(spans: Row, row: tuple[Entry, ...]) -> Iterator[int]:
    """Per span, the index of its entry. Equal actions run in the order of their row."""
    found: defaultdict[Action, deque[int]] = defaultdict(deque)
    for position, entry in enumerate(row):
        for action in actions_of(entry):
            found[action].append(position)
    return (found[span.action].popleft() for span in spans)


Ran = tuple[Turn, float, float, float, float]
"""A turn, its start and its end, and the end of its first action, which differs from the end only for pairs; and the
time in which its rank waits for tokens of experts.
"""

Durations = Mapping[Kind, Sequence[float] | Mapping[int, float]]
"""The time of an action per kind and stage."""


class Transfer(NamedTuple):
    """The transfer of a value to the rank that uses it: it occupies `link` for the time `held`, and arrives a `latency`
    later.
    """

    link: tuple[int, int]
    held: float = 0.0
    latency: float = 0.0


def loop(clock: Iterable[Ran], there: list[float], transfers: Sequence[Transfer], ranks: int) -> tuple[Row, ...]:
    """Per rank, its spans in the order of their starts.

    Args:
        clock: turns that ran, each after the turns that made its values.
        there: per value, the time when it arrives at its user. The loop writes these times.
        transfers: per value, its transfer to its user.
        ranks: number of ranks.
    """
    left: defaultdict[tuple[int, int], float] = defaultdict(float)  # per link, when its last value has left
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    for (rank, actions, _, makes), start, end, middle, waits in clock:
        if len(actions) == 1:
            spans[rank].append(Span(actions[0], rank, start, end, None, waits))
        else:
            forward, backward = actions
            first = waits * (middle - start) / (end - start) if waits else 0.0
            spans[rank].append(Span(forward, rank, start, middle, backward, first))
            spans[rank].append(Span(backward, rank, middle, end, forward, waits - first))
        for value in makes:
            link, held, latency = transfers[value]
            if held:
                left[link] = there[value] = max(left[link], end) + held
                there[value] += latency
            else:
                there[value] = end + latency
    return tuple(tuple(sorted(row, key=attrgetter("start"))) for row in spans)


def unlimited(
    turns: Iterable[Turn],
    there: list[float],
    durations: Durations,
    pairing: Pairing,
    varied: Mapping[Part, Durations] = {},
    *,
    joint: bool = True,
    begin: float = 0.0,
) -> Iterator[Ran]:
    """The clock of ranks that compute as fast as the costs say: from `begin` on, a turn runs as soon as its values have
    arrived and its stream is free. `turns` come in an order in which their values are made. Joint actions run at the
    same time on all ranks that have them, unless `joint` is false. `varied` has the durations of each microbatch or
    slice that differs from others.
    """
    free: defaultdict[int, float] = defaultdict(lambda: begin)
    beside: defaultdict[tuple[int, Stream], float] = defaultdict(float)  # when each other stream is free
    reached: defaultdict[tuple[Kind, int], list[tuple[float, Turn]]] = defaultdict(list)
    usual = durations
    for turn in turns:
        rank, actions, needs, _ = turn
        action, start = actions[0], free[rank]
        kind = action.kind
        if varied:
            # joint actions have the same time in all of them
            durations = varied.get((action.microbatch, action.slice), usual)
        for value in needs:
            if there[value] > start:
                start = there[value]
        if len(actions) > 1:
            other = actions[1]
            its = varied.get((other.microbatch, other.slice), usual)
            times = durations[kind][action.stage], its[other.kind][other.stage]
            took = pairing.time(actions, *times)
            end = free[rank] = start + took
            yield turn, start, end, start + took * _part_of_first(*times), pairing.exposed(actions, times, took)
        elif kind not in BESIDE:
            took = durations[kind][action.stage]
            end = free[rank] = start + took
            yield turn, start, end, end, pairing.exposed(actions, (took,), took) if pairing.shares else 0.0
        elif joint and DATAFLOW[kind].joint:
            reached[kind, action.stage].append((start, turn))
        else:
            lane = rank, BESIDE[kind]
            start = max(start, beside[lane])
            end = beside[lane] = start + durations[kind][action.stage]
            yield turn, start, end, end, 0.0
    yield from _together(reached, durations, beside)


def _together(
    reached: Mapping[tuple[Kind, int], list[tuple[float, Turn]]],
    durations: Durations,
    free: defaultdict[tuple[int, Stream], float],
) -> Iterator[Ran]:
    """When joint actions run, from the times at which their ranks reach them in their rows. All ranks that hold the
    stage run one at the same time. On one stream they run one at a time, in the order in which their last rank reaches
    them.
    """
    for (kind, stage), parts in sorted(reached.items(), key=lambda each: max(time for time, _ in each[1])):
        stream = DATAFLOW[kind].stream
        start = max(max(time, free[turn.rank, stream]) for time, turn in parts)
        for _, turn in parts:
            end = free[turn.rank, stream] = start + durations[kind][stage]
            yield turn, start, end, end, 0.0


def _part_of_first(one: float, other: float) -> float:
    """The part of a pair that the span of its forward gets: in proportion to the times that its actions take alone."""
    return one / (one + other) if one + other else 0.0


def transfers(schedule: Schedule, cost: CostModel, order: Order) -> list[Transfer]:
    """The transfer of each value of `order`."""
    return [transfer for end in order.ends for transfer in _of_end(schedule, cost, end)]


def _of_end(schedule: Schedule, cost: CostModel, end: End) -> list[Transfer]:
    """The transfer of a value, per microbatch. A gradient is as large as the activation it belongs to, so both have the
    factor of the stage that makes the activation.
    """
    paths, source, target = schedule.placement.paths, *sorted((end.stage, end.of(0).user))
    route = None if end.to is None else Route(source, target)
    by_path = []
    for path in paths:
        link = path[end.stage], path[end.of(0).user]
        stays = source == target or link[0] == link[1]
        costs = (0.0, 0.0) if stays else (cost.holding(source, *link, route), cost.link(*link).latency)
        by_path.append(Transfer(link, *costs))
    each = [by_path[microbatch % len(paths)] for microbatch in range(schedule.num_microbatches)]
    if end.slice is not None:
        length = slice_lengths(cost, schedule.slices)[end.slice]
        each = [Transfer(link, held * length, latency) for link, held, latency in each]
    if not cost.factors or not any(move.held for move in by_path):
        return each
    factors = cost.factors[source]
    return [Transfer(link, held * factor, latency) for (link, held, latency), factor in zip(each, factors, strict=True)]


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
        self._pairing = pairing_of(cost)
        self._varied = _varied(schedule, cost)
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
            if _stream_of(turn) is not Stream.COMPUTE:
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
        seconds = self._alone(turn)
        self._busy.add(self._lane(turn.rank, _stream_of(turn)))
        self._number += 1
        heappush(self._running, _Task(self._had + seconds, self._number, turn, self._now))

    def _ended(self, task: _Task) -> Ran:
        turn, start = task.turn, task.start
        self._busy.remove(self._lane(turn.rank, _stream_of(turn)))
        times, alone, took = self._times(turn), self._alone(turn), self._now - start
        waits = self._pairing.exposed(turn.actions, times, alone) * (took / alone if alone else 1)
        if len(times) == 1:
            return turn, start, self._now, self._now, waits
        return turn, start, self._now, start + took * _part_of_first(*times), waits

    def _alone(self, turn: Turn) -> float:
        """The time that a turn takes with a processor of its own."""
        times = self._times(turn)
        return times[0] if len(times) == 1 else self._pairing.time(turn.actions, *times)

    def _times(self, turn: Turn) -> list[float]:
        """The time that each action of a turn takes alone."""
        usual, varied = self._cost.durations, self._varied
        tables = [varied.get((action.microbatch, action.slice), usual) for action in turn.actions]
        return [table[action.kind][action.stage] for table, action in zip(tables, turn.actions, strict=True)]


def _stream_of(turn: Turn) -> Stream:
    return DATAFLOW[turn.actions[0].kind].stream
