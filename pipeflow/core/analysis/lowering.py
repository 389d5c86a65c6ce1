"""Lower: turns the order of actions into one program per rank, with the sends and receives that follow from it. Must
not contain: the execution of programs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import replace
from typing import NamedTuple

from pipeflow.core.action import Entry, Pair, actions_of
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import PASSING, Content, End, Stream, Value, flows, stream_of
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.route import Routes
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span

# Theory of operation
#
# A schedule says what each rank computes and in which order, and nothing of transfers. They follow from the table of
# actions: a value that is made on one rank and used on another is sent. What is left to decide is when. A send comes
# directly after the action that makes the value. A receive is posted as early as the simulation says that it helps,
# and no earlier, because each receive that is posted occupies a buffer. Between an ordered pair of ranks, sends and
# receives have the same order, so messages need no numbers, and no program waits for a message behind one that comes
# later.


def lower(schedule: Schedule, cost: CostModel | None = None, routes: Routes = ()) -> tuple[Program, ...]:
    """One program per rank. A value that is made and used on different ranks becomes a Send directly after the action
    that makes it, and a Recv before the action that uses it. Values that pass on `routes` do so too.

    Receives are posted ahead, so that transfers overlap with computation. A sender may start only when it knows that
    the receive is posted. This takes the latency of the link, so a receive must be posted that long before the value is
    made. The times come from a simulation under `cost`; since real times differ, each receive is posted one action
    earlier than that. Between an ordered pair of ranks, values keep the sender's order at both ends. A Release of a
    sent value follows when a value has come back that was made after the sent value was used. Actions on other streams,
    such as reductions, follow the sends of the computation before them, and change nothing else in the program.

    Args:
        schedule: the schedule.
        cost: the costs that receives are placed by. None: those of `CostModel.even`.
        routes: the routes of the pipeline, see `pipeflow.core.route`.

    Raises ScheduleError if the schedule cannot run to its end.
    """
    rows = simulate(schedule, cost).on(Stream.COMPUTE)  # raises an error if it cannot run to its end
    whole = schedule.rows
    computations = (tuple(entry for entry in row if stream_of(entry) is Stream.COMPUTE) for row in whole)
    schedule = replace(schedule, rows=tuple(computations))
    times = [_times(row, spans) for row, spans in zip(schedule.rows, rows, strict=True)]
    del rows  # otherwise the garbage collector walks it again and again
    channels = dict(sorted(_channels(schedule, routes).items()))
    posts = _posts(times, channels, cost or CostModel.even(schedule.placement))
    after = _after(whole, list(map(len, schedule.rows)), channels)
    programs = []
    for rank, row in enumerate(schedule.rows):
        instructions: list[Instruction] = [*after[rank].get(-1, ())]
        for position, entry in enumerate(row):
            instructions += posts[rank].get(position, ())
            instructions.append(Compute(entry))
            instructions += after[rank].get(position, ())
        programs.append(Program(rank, tuple(instructions), _buffers(row, posts[rank])))
    return tuple(programs)


class _ValueMove(NamedTuple):
    """A value, its position in the sender's row where it is made, and in the receiver's row where it is used."""

    value: Value
    made: int
    used: int


Channels = dict[tuple[int, int], list[_ValueMove]]  # (from, to) -> in the sender's order


def _channels(schedule: Schedule, routes: Routes) -> Channels:
    """The values that pass between ranks, per pair of ranks."""
    table = {
        key: flow._replace(needs=_passing(flow.needs), makes=_passing(flow.makes))
        for key, flow in flows(schedule.placement.num_stages, routes, schedule.slices).items()
    }
    users: dict[End, dict[int, tuple[int, int]]] = defaultdict(dict)  # per microbatch
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                for end in table[action.kind, action.stage, action.slice].needs:
                    users[end][action.microbatch] = rank, position
    channels: Channels = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                microbatch = action.microbatch
                for end in table[action.kind, action.stage, action.slice].makes:
                    user, used = users[end].get(microbatch, (rank, 0))
                    if user != rank:
                        channels[rank, user].append(_ValueMove(end.of(microbatch), position, used))
    return channels


def _passing(ends: tuple[End, ...]) -> tuple[End, ...]:
    return tuple(end for end in ends if end.content in PASSING)


def _posts(times: list[Times], channels: Channels, cost: CostModel) -> list[dict[int, list[Recv]]]:
    """Per rank and position, the receives that are posted before the entry there."""
    posts: list[dict[int, list[Recv]]] = [defaultdict(list) for _ in times]
    for (sender, receiver), transfers in channels.items():
        (starts, _), (_, ends) = times[receiver], times[sender]
        notice = cost.link(receiver, sender).latency  # time until the sender knows of a post
        activations = {
            value: made
            for value, made, _ in channels.get((receiver, sender), ())
            if value.content is Content.ACTIVATION
        }
        position = running = 0  # the entry that the receiver runs when the post must be on its way
        for value, made, _ in transfers:
            latest = ends[made] - notice
            while running + 1 < len(starts) and starts[running + 1] < latest:
                running += 1
            position = max(position, running - 1)  # in the sender's order
            if value.content is Content.GRADIENT:  # has its activation's shape: is posted after that was made
                position = max(position, activations[value.answered] + 1)
            posts[receiver][position].append(Recv(value, sender))
    return posts


Times = tuple[list[float], list[float]]
"""The start and the end of each entry of a row."""


def _times(row: tuple[Entry, ...], spans: tuple[Span, ...]) -> Times:
    """The times of the entries of a row. A pair has two spans."""
    remaining = iter(spans)
    starts, ends = list[float](), list[float]()
    for entry in row:
        first = last = next(remaining)
        if isinstance(entry, Pair):
            last = next(remaining)
        starts.append(first.start)
        ends.append(last.end)
    return starts, ends


def _after(
    rows: tuple[tuple[Entry, ...], ...], lengths: list[int], channels: Channels
) -> list[dict[int, list[Instruction]]]:
    """Per rank and position among its computations, of which there are so many, what follows the one there: its sends,
    the actions of other streams in `rows`, and the releases of sent values. At -1: what comes before the first one.

    Where no value from the receiver proves a use, the release comes after the last entry.
    """
    after: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in rows]
    for (sender, receiver), transfers in channels.items():
        for value, made, _ in transfers:
            after[sender][made].append(Send(value, receiver))
    for rank, row in enumerate(rows):
        position = -1
        for entry in row:
            if stream_of(entry) is Stream.COMPUTE:
                position += 1
            else:
                after[rank][position].append(Compute(entry))
    for (sender, receiver), transfers in channels.items():
        answers = channels.get((receiver, sender), [])
        proofs = [answer.made for answer in answers]
        for value, _, used in transfers:
            proof = bisect_left(proofs, used)
            position = answers[proof].used if proof < len(answers) else lengths[sender] - 1
            after[sender][position].append(Release(value, receiver))
    return after


def _buffers(row: tuple[Entry, ...], posts: dict[int, list[Recv]]) -> int:
    """The most received values alive at once. Each is alive from the post of its receive until its stage's last action
    on the microbatch.
    """
    last = {action.work: position for position, entry in enumerate(row) for action in actions_of(entry)}
    alive = peak = 0
    ends: Counter[int] = Counter()
    for position in range(len(row)):
        for recv in posts.get(position, ()):
            alive += 1
            ends[last[recv.value.user, recv.value.microbatch, recv.value.slice]] += 1
        peak = max(peak, alive)
        alive -= ends[position]
    return peak
