"""Lower: from one order of actions to one program per rank, with the sends and receives that follow from it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict

from pipeflow.analysis.simulate import simulate
from pipeflow.core.action import Entry, actions_of
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content, Value, flows
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Span


def lower(schedule: Schedule, cost: CostModel | None = None) -> tuple[Program, ...]:
    """One program per rank. A value whose maker and user sit on different ranks becomes a Send right after its
    maker, and a Recv before its user.

    Receives are posted ahead, so that the transfer overlaps computation: each one action before the one that its
    rank runs when the value is sent, in a simulation under `cost`; real times are never quite those. Between an
    ordered pair of ranks, activations keep the sender's order on both ends, and so do gradients. A Release follows
    as soon as a value made after the use of the sent one has come back.

    Raises ScheduleError when the schedule cannot run to its end.
    """
    transfers = _Transfers(schedule)
    posts = _posts(schedule, transfers, cost)
    releases = _releases(schedule, transfers)
    return tuple(_program(schedule, rank, transfers, posts[rank], releases[rank]) for rank in range(len(schedule.rows)))


Name = tuple[Content, int, int]  # a Value, or the plain tuple that equals it and is made faster


class _Transfers:
    """Per ordered pair of ranks, the values that pass, in the sender's order; where each is made and used."""

    def __init__(self, schedule: Schedule) -> None:
        table = flows(schedule.placement.num_stages)
        self.made: dict[Name, tuple[int, int]] = {}  # value -> (rank, position)
        self.used: dict[Name, tuple[int, int]] = {}
        for rank, row in enumerate(schedule.rows):
            for position, entry in enumerate(row):
                for action in actions_of(entry):
                    flow = table[action.kind, action.stage]
                    for content, stage in flow.makes:
                        self.made[content, stage, action.microbatch] = (rank, position)
                    for content, stage in flow.needs:
                        self.used[content, stage, action.microbatch] = (rank, position)
        self.channels: dict[tuple[int, int], list[Value]] = defaultdict(list)
        for value, (maker, _) in self.made.items():
            if value in self.used and (user := self.used[value][0]) != maker:
                self.channels[maker, user].append(Value(*value))


def _posts(schedule: Schedule, transfers: _Transfers, cost: CostModel | None) -> list[dict[int, list[Recv]]]:
    """Per rank and position, the receives to post before the entry there."""
    timeline = simulate(schedule, cost)
    times = [_entry_times(row, spans) for row, spans in zip(schedule.rows, timeline.rows, strict=True)]
    posts: list[dict[int, list[Recv]]] = [defaultdict(list) for _ in schedule.rows]
    for (sender, receiver), values in sorted(transfers.channels.items()):
        running = 0  # the entry that the receiver is at when the value is sent
        described = 0  # a gradient looks like its activation, so it is posted for once that was made
        for value in values:
            _, sent = times[sender][transfers.made[value][1]]
            while running + 1 < len(times[receiver]) and times[receiver][running + 1][0] < sent:
                running += 1
            position = max(0, running - 1)
            if value.content is Content.GRADIENT:
                activation = (Content.ACTIVATION, value.stage - 1, value.microbatch)
                described = max(described, transfers.made[activation][1] + 1)
                position = max(position, described)
            posts[receiver][position].append(Recv(value, sender))
    return posts


def _entry_times(row: tuple[Entry, ...], spans: tuple[Span, ...]) -> list[tuple[float, float]]:
    """Per entry of a row, its start and end; a pair has two spans."""
    remaining = iter(spans)
    times = []
    for entry in row:
        of_entry = [next(remaining) for _ in actions_of(entry)]
        times.append((of_entry[0].start, of_entry[-1].end))
    return times


def _releases(schedule: Schedule, transfers: _Transfers) -> list[dict[int, list[Release]]]:
    """Per rank and position, the sent values to let go of after the entry there; what no value proves comes
    after the last entry.
    """
    releases: list[dict[int, list[Release]]] = [defaultdict(list) for _ in schedule.rows]
    for (sender, receiver), values in sorted(transfers.channels.items()):
        answers = transfers.channels.get((receiver, sender), [])
        made = [transfers.made[answer][1] for answer in answers]
        for value in values:
            proof = bisect_left(made, transfers.used[value][1])
            position = transfers.used[answers[proof]][1] if proof < len(answers) else len(schedule.rows[sender]) - 1
            releases[sender][position].append(Release(value, receiver))
    return releases


def _program(
    schedule: Schedule,
    rank: int,
    transfers: _Transfers,
    posts: dict[int, list[Recv]],
    releases: dict[int, list[Release]],
) -> Program:
    table = flows(schedule.placement.num_stages)
    instructions: list[Instruction] = []
    for position, entry in enumerate(schedule.rows[rank]):
        instructions += posts.get(position, ())
        instructions.append(Compute(entry))
        for action in actions_of(entry):
            for content, stage in table[action.kind, action.stage].makes:
                user, _ = transfers.used.get((content, stage, action.microbatch), (rank, 0))
                if user != rank:
                    instructions.append(Send(Value(content, stage, action.microbatch), user))
        instructions += releases.get(position, ())
    return Program(rank, tuple(instructions), _receive_buffers(schedule.rows[rank], posts))


def _receive_buffers(row: tuple[Entry, ...], posts: dict[int, list[Recv]]) -> int:
    """The most received values alive at once: from the post until the user's stage is done with the microbatch."""
    last = {
        (action.stage, action.microbatch): position
        for position, entry in enumerate(row)
        for action in actions_of(entry)
    }
    alive = peak = 0
    ends: Counter[int] = Counter()
    for position in range(len(row)):
        for recv in posts.get(position, ()):
            user = recv.value.stage + (1 if recv.value.content is Content.ACTIVATION else -1)
            alive += 1
            ends[last[user, recv.value.microbatch]] += 1
        peak = max(peak, alive)
        alive -= ends[position]
    return peak
