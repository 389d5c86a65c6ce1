"""Readings: the ways to read a recording of which names do not say all, and what contradicts them. Must not contain:
how actions are divided into steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.idle_time import LATE, Usual, pauses
from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.text import seconds_text
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.families import schedules_on
from pipeflow.tools.traces.action_names import RecordedAction, marked_steps
from pipeflow.tools.traces.events import RankEvents
from pipeflow.tools.traces.steps import Part, Recorded, Step, shortest, steps_of

# Theory of operation
#
# Where names do not say all, a recording can be read in several ways: some ranks may be replicas of others, stages may
# be in another order than ranks, a rank may have several of them. Each way is tried, the plainest first, and the first
# one that nothing contradicts is told: its order must be one that can end, ranks must have sent what its stages
# exchange, no value may be used before it is made, and replayed under its own costs it must take as long as it did.

REPLAYED = 0.1  # by how much a replay may differ from what was recorded, as a share of it
EARLY = 0.01  # by which an action may begin before what it needs is made, as a share of the step
SHOWN = 8  # ranks of a chain in an error
DEEPEST = 256  # ranks of one of several pipelines
CHUNKS = 16  # stages of a rank
MANY = 100  # steps: more are not replayed one by one
CLOSE = 1e-6  # seconds by which times of one moment may differ


_start = attrgetter("start")


class Reading(NamedTuple):
    """A way to read a recording.

    Attributes:
        chain: places of the ranks that are read, in the order of their first stages.
        schedule: the schedule that gives stages and microbatches; None: each rank has one stage.
        steps: the actions of each step, by place in the chain.
        damaged: the number of other steps, in which a rank has other actions, or another order.
    """

    chain: Sequence[int]
    schedule: Schedule | None
    steps: list[Step]
    damaged: int

    def __str__(self) -> str:
        if self.schedule is not None:
            return f"{self.schedule.name} with {self.schedule.placement.num_stages} stages"
        some = ", ".join(map(str, self.chain[:SHOWN])) + ", ..." * (len(self.chain) > SHOWN)
        return f"{len(self.chain)} stages on ranks {some}"


def readings_of(actions: Sequence[Recorded], hosts: Sequence[str], *, messages: bool) -> Iterator[Reading]:
    """The ways to read a recording, the plainest first. Where the profiler marks no steps, a step ends where the
    optimizer steps, or else where a rank has run the backwards of all its forwards. `messages` says whether sends and
    receives were recorded. Raises UsageError if there is no step in any way.
    """
    everyone = [each for own in actions for each in own]
    updated = any(each.update for each in everyone) and all(each.step is None for each in everyone)
    errors, is_any = list[UsageError](), False
    for by_updates in (True, False) if updated else (False,):
        marked = [[replace(each, step=each.update) for each in own] for own in actions] if by_updates else actions
        for chain in _chains(marked):
            try:
                steps, damaged = steps_of([list(map(replace, marked[place])) for place in chain])
            except UsageError as error:
                errors.append(error)
                continue
            is_possible = steps and _begins_in_turn(steps[0], [hosts[place] for place in chain])
            for schedule in _fitting(steps[0], messages=messages) if is_possible else (None,):
                is_any = True
                yield Reading(chain, schedule, [_staged(step, schedule) for step in steps], damaged)
    if errors and not is_any:
        raise errors[0]


def _chains(actions: Sequence[Recorded]) -> Iterator[Sequence[int]]:
    """The ranks of a pipeline, in the order of their stages: all in the order of their numbers, or of their first
    forwards; or one of several pipelines whose ranks do the same at the same time, in the order of their numbers, or
    each with the rank whose values it can have used at once.
    """
    many = len(actions)
    yield range(many)
    try:
        [step, *_], _ = steps_of([list(map(replace, own)) for own in actions])
    except (UsageError, ValueError):  # there is none
        return
    in_turn = sorted(
        range(many),
        key=lambda place: min((each.start for each in step[place] if each.kind is Kind.F), default=math.inf),
    )
    if in_turn != [*range(many)]:
        yield in_turn
    for stages in range(min(many // 2, DEEPEST), 1, -1):
        if many % stages == 0:
            alike = many // stages
            levels = [sorted(in_turn[first : first + alike]) for first in range(0, many, alike)]
            yield [level[0] for level in levels]
            chain = levels[0][:1]
            for level in levels[1:]:
                chain.append(min(level, key=lambda place: _lag(step[chain[-1]], step[place])))
            yield chain


def _begins_in_turn(step: Step, hosts: Sequence[str]) -> bool:
    """Whether ranks begin one after the other, as in all schedules that are tried, by the clocks of their machines."""
    firsts = [min((each for each in own if each.kind is Kind.F), key=_start, default=None) for own in step]
    length = max(own[-1].end for own in step) - min(own[0].start for own in step)
    return not any(
        hosts[place] == hosts[place + 1] != "" and one and other and other.start < one.end - EARLY * length
        for place, (one, other) in enumerate(pairwise(firsts))
    )


def _lag(one: Part, other: Part) -> float:
    """How long forwards of a rank begin after those of the rank before it, and backwards before: infinite if a value
    would be used before it is made.
    """
    total = 0.0
    for kind, maker, user in ((Kind.F, one, other), (Kind.B, other, one)):
        made = {each.named.microbatch: each.end for each in maker if each.kind is kind}
        waits = [each.start - made.get(each.named.microbatch, -math.inf) for each in user if each.kind is kind]
        total += sum(waits) if min(waits, default=0.0) >= 0 else math.inf
    return total


def _staged(step: Step, schedule: Schedule | None) -> Step:
    """The actions of a step with stages where names do not say them: their places in the chain of ranks, or those of
    the schedule, which gives microbatches, too.
    """
    if schedule is None:
        return [
            [
                each
                if each.named.stage is not None
                else _named(each, Action(each.kind, place, each.named.microbatch or 0))
                for each in own
            ]
            for place, own in enumerate(step)
        ]
    return [_as_in(own, [*schedule.actions(place)]) for place, own in enumerate(step)]


def _as_in(own: Recorded, row: Sequence[Action]) -> Part:
    """The actions of a rank, of which `_shown` chose those that are recorded, as those of a row; the others take no
    time, when the next one begins.
    """
    found, left = Part(), [*own]
    chosen = {*(_shown(own, row) or row)}
    for action in row:
        if action in chosen:
            found.append(_named(left.pop(0), action))
        else:
            moment = left[0].start if left else found[-1].end
            found.append(replace(_named(own[0], action), start=moment, end=moment))
    return found


def _named(recorded: RecordedAction, action: Action) -> RecordedAction:
    named = recorded.named._replace(kind=action.kind, stage=action.stage, microbatch=action.microbatch)
    return replace(recorded, kind=action.kind, named=named)


def _fitting(step: Step, *, messages: bool) -> Iterator[Schedule | None]:
    """The schedules that a step may show: None for one stage per rank, and named ones of several stages. Those come
    first if they have a name and one stage does not. Last come those that have the forwards of a named one, and the
    backwards in another order: without `messages`, nothing would contradict most of them.
    """
    forwards, found = sum(each.kind is Kind.F for each in step[0]), list[Schedule | None]()
    others: dict[object, Schedule] = {}
    is_said = all(each.named.stage is not None for own in step for each in own)
    for chunks in () if is_said else (each for each in range(1, min(forwards, CHUNKS) + 1) if forwards % each == 0):
        placements = [Placement.looped(len(step), chunks)]
        if chunks == 2 and len(step) > 1:
            placements.append(Placement.vee(len(step)))
        for placement in placements:
            for schedule in schedules_on(placement, forwards // chunks):
                rows = [list(schedule.actions(rank)) for rank in range(len(step))]
                if all(_shown(own, row) is not None for own, row in zip(step, rows, strict=True)):
                    is_plain = chunks == 1 and [*map(len, rows)] == [*map(len, step)]
                    found.append(None if is_plain else schedule)
                elif chunks > 1 and messages and (other := _with_backwards(schedule, step)) is not None:
                    others.setdefault(other.rows, other)
    yield from dict.fromkeys([*found, None, *others.values()])


def _with_backwards(schedule: Schedule, step: Step) -> Schedule | None:
    """A schedule with its forwards in their order, and the rest where a step has it; None if operators do not show the
    forward of each backward.
    """
    rows = list[tuple[Action, ...]]()
    for rank, own in enumerate(step):
        numbers = [each.index for each in own if each.kind is Kind.F]
        forwards = [action for action in schedule.actions(rank) if action.kind is Kind.F]
        place = dict(zip(numbers, forwards, strict=False))
        if None in numbers or len(place) < len(forwards) or any(each.index not in place for each in own):
            return None
        actions = ((each.kind, place[each.index]) for each in own)
        rows.append(tuple(Action(kind, forward.stage, forward.microbatch) for kind, forward in actions))
    if [*map(len, rows)] != [len({*row}) for row in rows]:
        return None
    return replace(schedule, name=f"{schedule.name}, other backwards", rows=tuple(rows))


def _shown(own: Recorded, row: Sequence[Action]) -> list[Action] | None:
    """The actions of a row that a rank recorded, if it shows this row: all of them, or those without the halves I of
    the first stage, which some engines leave to W. None if it shows another row.
    """
    some = [each for each in row if (each.kind, each.stage) != (Kind.I, 0)]
    for actions in (row, some):
        kinds = [
            Kind.B if (actions is some) and each.kind is Kind.W and not each.stage else each.kind for each in actions
        ]
        if [each.kind for each in own] == kinds and _agrees(own, actions):
            return [*actions]
    return None


def _agrees(own: Recorded, row: Sequence[Action]) -> bool:
    """Whether backwards belong to the same forwards in a schedule, where operators show these."""
    forwards: dict[int | None, tuple[int, int]] = {}
    for each, action in zip(own, row, strict=True):
        place = action.stage, action.microbatch
        if each.index is not None and forwards.setdefault(each.index, place) != place:
            return False
    return True


def median_step(steps: Sequence[Timeline]) -> Timeline:
    """The step of median length."""
    return sorted(steps, key=lambda each: each.makespan)[(len(steps) - 1) // 2]


def replay(step: Timeline) -> Timeline:
    """A step, simulated under the costs that it shows."""
    return simulate(executed_schedule(step), measured_costs(step, late_apart=True))


def is_alike(played: Timeline, step: Timeline) -> bool:
    """Whether a replay takes about as long as the step."""
    return abs(played.makespan - step.makespan) <= REPLAYED * step.makespan


def replayed_steps(steps: Sequence[Timeline]) -> list[int]:
    """The places of the steps to explain: all of them or, if the median one takes much more or less time than its
    replay, those that do not, if these are at least half of them.
    """

    def is_replayed(step: Timeline) -> bool:
        schedule = executed_schedule(step)
        return not verify(schedule) and (schedule.is_forward_only or is_alike(replay(step), step))

    everyone = [*range(len(steps))]
    if not 1 < len(steps) <= MANY or is_replayed(median_step(steps)):
        return everyone
    some = [place for place in everyone if is_replayed(steps[place])]
    return some if 2 * len(some) >= len(steps) else everyone


def require_consistent(
    reading: Reading, steps: Sequence[Timeline], ordered: Sequence[RankEvents], actions: Sequence[Recorded]
) -> None:
    """Raises UsageError if what was recorded contradicts a reading."""
    middle = median_step([steps[place] for place in replayed_steps(steps)])
    schedule, step = executed_schedule(middle), reading.steps[steps.index(middle)]
    if wrong := verify(schedule):
        raise UsageError(str(wrong[0]))
    hosts = [ordered[place].host for place in reading.chain]
    for (maker, user), delay in shortest([step], schedule.placement.num_stages).items():
        if hosts[maker] == hosts[user] != "" and delay < -EARLY * middle.makespan:
            ranks = reading.chain[user], reading.chain[maker]
            raise UsageError(
                "rank {} would use a value before rank {} makes it, by the clock of one machine".format(*ranks)
            )
    parts = zip(reading.chain, step, strict=True)
    own = [_messages(place, ordered[place], part, actions[place]) for place, part in parts]
    if any(each.sends or each.receives for each in own):
        _require_messages(reading, step, own)
    if not schedule.is_forward_only and not is_alike(played := replay(middle), middle):
        raise UsageError(unlike(played, middle))


def unlike(played: Timeline, step: Timeline) -> str:
    """How far a replay, which has mean pauses, differs from a step, and what it explains least: the pause without a
    reason that is longest beside what rank and action usually take, if it is much longer.
    """
    cost, usual = measured_costs(step), Usual(step)
    found = [*pauses(step, lambda link: cost.link(*link).latency)]
    middle = median([pause for _, pause in found] or [0.0])
    span, longest = max(found, key=lambda each: each[1], default=(None, 0.0))
    what = f"its replay differs from it by {played.makespan / step.makespan - 1:+.0%}"
    if span is None or longest <= LATE * (middle + usual.of(span.action)):
        return what
    where = f"rank {span.rank} stood still for {seconds_text(longest)} before {span.action}"
    return f"{what}, and {where} although nothing was missing"


class _Messages(NamedTuple):
    """When a rank sent in a step, and when it received, in order.

    Attributes:
        rank: the rank's place among all that were recorded.
        sends, receives: the times.
        is_after: whether it sends what it has computed before: a host launches both ahead on a device.
    """

    rank: int
    sends: list[float]
    receives: list[float]
    is_after: bool

    def __str__(self) -> str:
        return f"rank {self.rank} sent {len(self.sends)} times and received {len(self.receives)} times"


def _messages(place: int, events: RankEvents, part: Part, actions: Recorded) -> _Messages:
    """The messages of a rank in a step: within its mark, or else around its actions."""
    number = part[0].step
    if number is not None and (mark := marked_steps(events).get(number)):
        starts = ends = mark.start, mark.end
    else:
        first, last = part[0].start, part[-1].end
        before = max((each.end for each in actions if each.end <= first), default=-math.inf)
        after = min((each.start for each in actions if each.start >= last), default=math.inf)
        starts, ends = (first, after), (before - CLOSE, last - CLOSE)
    sends, receives = (
        sorted(each.start for each in every if begin <= each.start < end)
        for every, (begin, end) in ((events.sends, starts), (events.receives, ends))
    )
    return _Messages(place, sends, receives, not events.kernels)


def _require_messages(reading: Reading, step: Step, messages: Sequence[_Messages]) -> None:
    """Raises UsageError if ranks do not send and receive what passes between the stages of a reading. How many tensors
    that is between two stages, nothing says.
    """
    schedule = reading.schedule
    forwards = sum(each.kind is Kind.F for each in reading.steps[0][0])
    passed = returned = 0.0  # tensors per microbatch: forwards from the rank before, and backwards to it
    for place, own in enumerate(messages):
        sent, got = len(own.sends), len(own.receives)
        if schedule is None:
            passed, returned = sent / forwards - returned, got / forwards - passed
            is_last = place == len(messages) - 1
            fits = passed == returned == 0 if is_last else passed >= 1 and passed % 1 == returned % 1 == 0 <= returned
        else:
            edges = [_edges(schedule.placement, rank) for rank in (0, place)]
            first = len(messages[0].sends), len(messages[0].receives)
            fits = all(count * edges[0] == other * edges[1] for count, other in zip((sent, got), first, strict=True))
            if fits and not _in_time(own, step[place], schedule.placement):
                raise UsageError(f"rank {own.rank} sent values before it made them, or received them after their use")
        if not fits:
            raise UsageError(str(own))


def _in_time(messages: _Messages, part: Part, placement: Placement) -> bool:
    """Whether a rank can have received each value of other ranks before its use, and sent its own after they were made,
    if all values are of the same number of tensors.
    """
    taken, made = ([_leaves(each.action, side, placement) for each in part] for side in (-1, 1))
    counts = [len(each) / (sum(known) or 1) for each, known in ((messages.receives, taken), (messages.sends, made))]
    if any(count % 1 for count in counts):
        return True
    used = [count * counts[0] for count in accumulate(taken)]
    there = [0.0, *(count * counts[1] for count in accumulate(made))]
    return all(
        bisect_right(messages.receives, each.start + CLOSE) >= needed
        and (not messages.is_after or bisect_left(messages.sends, each.end - CLOSE) <= given)
        for each, needed, given in zip(part, used, there[:-1], strict=True)
        if each.start < each.end
    )


def _leaves(action: Action, side: int, placement: Placement) -> bool:
    """Whether what an action makes (side 1) or needs (side -1) passes between ranks."""
    path = placement.paths[action.microbatch % len(placement.paths)]
    other = action.stage + side * {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind, 0)
    return 0 <= other < len(path) and path[other] != path[action.stage]


def _edges(placement: Placement, rank: int) -> int:
    """How many neighbours of the stages of a rank are on other ranks."""
    links = (link for path in placement.paths for link in pairwise(path) if link[0] != link[1])
    return sum(rank in link for link in links)
