"""Rebuild: the timeline of each step from the events of all ranks, on one clock: actions are divided into steps, each
gets its microbatch and stage, also where no name says them, and clocks are aligned. Must not contain: the formats of
files, what annotations mean, and why a rank was idle.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Key, makers, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.rows import placement_of
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Row, Span, Timeline
from pipeflow.schedules.families import schedules_on
from pipeflow.tools.traces.action_names import Named, Names, RecordedAction, recorded_actions
from pipeflow.tools.traces.events import RankEvents

HOW_TO = "record a step with torch.profiler on every rank and export_chrome_trace, one file per rank"

Recorded = Sequence[RecordedAction]  # of a rank
Step = list[list[RecordedAction]]  # per rank
Part = list[RecordedAction]  # of one step, on one rank
Label = tuple[int, int]  # number of a step that the profiler marks, and which of the steps in it


class Rebuilt(NamedTuple):
    """A step rebuilt from traces.

    Attributes:
        steps: a timeline per step, in seconds from the start of the step.
        notes: sentences on what was missing or mended.
    """

    steps: list[Timeline]
    notes: list[str]


def rebuilt(ranks: Sequence[RankEvents], names: Names) -> Rebuilt:
    """The timelines of the steps that all ranks recorded whole. Raises UsageError where a rank is missing or shows no
    action, with what can be told and how to record the rest.
    """
    ordered = _ordered(ranks)
    notes = [
        f"{each.source} is cut off: what comes after its end is not counted" for each in ordered if each.is_cut_off
    ]
    actions: list[Recorded] = [recorded_actions(each, names) for each in ordered]
    for events, found in zip(ordered, actions, strict=True):
        if not found:
            raise UsageError(f"{events.source} shows no forward or backward: {_without_actions(events)}")
    ordered, actions = _one_replica(ordered, actions)
    _require_all(ordered, actions)
    steps, damaged = steps_of(actions)
    if not steps:
        raise UsageError(f"no step was recorded on all {len(ordered)} ranks at once: record the same steps on each")
    if damaged:
        notes.append(f"actions are missing in {damaged} other steps, which are left out: the recording lost events")
    give_stages(steps)
    placement = placement_of([[each.action for each in own] for own in steps[0]])
    if placement is None:
        raise UsageError("the stages are on no fixed ranks: stages must have the same rank in every step")
    shifts = offsets(steps, placement.num_stages, [each.host for each in ordered])
    if any(shifts):
        notes.append("the clocks of the ranks differ, and were aligned by the values that pass between ranks")
    return Rebuilt([_timeline(step, placement, shifts) for step in steps], notes)


def _ordered(ranks: Sequence[RankEvents]) -> list[RankEvents]:
    """The ranks in order. Files that do not say their rank keep the order in which they are given."""
    known = [each.rank for each in ranks if each.rank is not None]
    if not known:
        return [replace(each, rank=index) for index, each in enumerate(ranks)]
    if len(known) < len(ranks):
        files = ", ".join(each.source for each in ranks if each.rank is None)
        raise UsageError(f"neither these files nor their names say a rank: {files}; name them like rank0.json")
    if twice := sorted({rank for rank in known if known.count(rank) > 1}):
        files = ", ".join(each.source for each in ranks if each.rank == twice[0])
        raise UsageError(f"rank {twice[0]} is in several files ({files}): give the files of one run")
    ordered = sorted(ranks, key=lambda each: each.rank or 0)
    if pipeline := ordered[0].pipeline:  # replicas and tensor ranks do the same: the first pipeline stands for all
        places = {rank: place for place, rank in enumerate(pipeline)}
        own = [each for each in ordered if each.rank in places]
        return [replace(each, rank=places[each.rank or 0], ranks=len(pipeline)) for each in own]
    return ordered


def _one_replica(ranks: list[RankEvents], actions: list[Recorded]) -> tuple[list[RankEvents], list[Recorded]]:
    """The first of all ranks that run the same stages for the same microbatches, if names say them: the others are
    replicas or tensor ranks.
    """
    first: dict[frozenset[Named], int] = {}
    for place, found in enumerate(actions):
        first.setdefault(frozenset(each.named for each in found), place)
    is_said = all(each.named.stage is not None and each.named.microbatch is not None for own in actions for each in own)
    if len(first) == len(ranks) or not is_said:
        return ranks, actions
    kept = [replace(ranks[place], rank=number, ranks=len(first)) for number, place in enumerate(first.values())]
    return kept, [actions[place] for place in first.values()]


def _without_actions(events: RankEvents) -> str:
    if not events.ranges and not events.operators and not events.kernels:
        return f"it has no annotation and no operator; {HOW_TO}"
    names = (each.name for each in events.ranges if not each.name.startswith("aten::"))
    some = ", ".join(dict.fromkeys(names))[:200]
    named = f"; its annotations are {some}" if some else ""
    return f"give --names, a regular expression with the groups kind, stage and microbatch{named}"


def _require_all(ranks: Sequence[RankEvents], actions: Sequence[Recorded]) -> None:
    """Raises UsageError if ranks are missing, with what those that are there show."""
    whole = max((each.ranks or 0 for each in ranks), default=0)
    numbers = [each.rank for each in ranks]
    if len(ranks) >= whole and numbers == list(range(len(ranks))):
        return
    told = []
    for events, found in zip(ranks, actions, strict=True):
        busy, length = sum(each.end - each.start for each in found), found[-1].end - found[0].start
        told.append(f"rank {events.rank} runs {len(found)} actions and computes {busy / length:.0%} of {length:.4g} s")
    of = f" of {whole}" if whole else ""
    raise UsageError(
        f"{len(ranks)}{of} ranks were recorded ({'; '.join(told)}), but a schedule shows on all of them alone: {HOW_TO}"
    )


def _timeline(step: Step, placement: Placement, shifts: Sequence[float]) -> Timeline:
    zero = min(each.start + shift for own, shift in zip(step, shifts, strict=True) for each in own)
    rows = tuple(_row(own, rank, shifts[rank] - zero) for rank, own in enumerate(step))
    return Timeline("trace", placement, rows, unit="s")


def _row(own: Recorded, rank: int, shift: float) -> Row:
    """The spans of a rank. Computations of one rank run one after the other, so a span ends where the next one begins
    at the latest.
    """
    spans = []
    for index, each in enumerate(own):
        end = min([each.end, *(later.start for later in own[index + 1 : index + 2])])
        partner = None if each.named.partner is None else each.named.partner.action(Kind.F)
        spans.append(Span(each.action, rank, each.start + shift, max(end, each.start) + shift, partner))
    return tuple(spans)


def steps_of(ranks: Sequence[Recorded]) -> tuple[list[Step], int]:
    """Divides the actions of all ranks into steps. Returns those that all ranks recorded whole, or if there is none,
    the one with most actions; and how many others all ranks recorded, but not whole.

    Where names have microbatches, a step begins with the first action that the step before has already. Otherwise
    actions are counted: a step ends where a rank has run the backwards of all its forwards. A step never goes on in the
    next step of the profiler, if these are marked.
    """
    if _are_counted(ranks):
        _number(ranks, _forwards_of_a_step(ranks))
    parts = [_divided(actions) for actions in ranks]
    usual = [_usual(map(len, found)) for found in parts]
    labelled = [_labelled(found, parts[0]) for found in parts]
    common = sorted(set[Label]().union(*labelled).intersection(*labelled))
    steps = [[found[label] for found in labelled] for label in common]
    whole = [step for step in steps if [*map(len, step)] == usual]
    most = sorted(steps, key=lambda step: sum(map(len, step)))[-1:]
    return whole or most, len(steps) - len(whole or most)


def _usual(sizes: Sequence[int] | map[int]) -> int:
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size))


def _are_counted(ranks: Sequence[Recorded]) -> bool:
    """Whether names do not say the microbatches, or not which of several stages of a rank has them."""
    named = [each.named for actions in ranks for each in actions]
    if any(each.microbatch is None for each in named):
        return True
    if all(each.stage is not None for each in named):
        return False
    return _forwards_of_a_step(ranks) > len({each.microbatch for each in named})


def _divided(actions: Recorded) -> list[Part]:
    parts: list[Part] = []
    seen: set[object] = set()
    for each in actions:
        key = each.kind, each.named.stage, each.named.microbatch
        if not parts or key in seen or each.step != parts[-1][-1].step:
            parts.append([])
            seen = set()
        seen.add(key)
        parts[-1].append(each)
    return parts


def _labelled(parts: Sequence[Part], first: Sequence[Part]) -> Mapping[Label, Part]:
    """The parts of a rank, so that those of one step have the same label on all ranks: that of the profiler, or else
    their place. A rank may lack steps of the `first` one; then the places are moved to where most of its time fits.
    """
    if all(part[0].step is not None for part in parts):
        counts: Counter[int] = Counter()
        found: dict[Label, Part] = {}
        for part in parts:
            number = part[0].step or 0
            found[number, counts[number]] = part
            counts[number] += 1
        return found
    moves = range(-len(parts), len(first) + 1) if len(parts) != len(first) else (0,)
    move = max(moves, key=lambda each: (_shared(parts, first, each), -abs(each)))
    return {(0, place + move): part for place, part in enumerate(parts)}


def _shared(parts: Sequence[Part], first: Sequence[Part], move: int) -> float:
    """The time that parts have in common with those of another rank that are `move` places later."""
    pairs = [(part, first[place + move]) for place, part in enumerate(parts) if 0 <= place + move < len(first)]
    return sum(max(0.0, min(a[-1].end, b[-1].end) - max(a[0].start, b[0].start)) for a, b in pairs)


def _number(ranks: Sequence[Recorded], size: int) -> None:
    """Gives each action its microbatch: actions of a kind and stage are in the order of microbatches, unless operators
    show which backward belongs to which forward.
    """
    for actions in ranks:
        counts: defaultdict[object, int] = defaultdict(int)
        base: dict[int | None, int] = {}
        for each in actions:
            key = each.step, each.kind, each.named.stage
            if each.index is not None and each.step is not None:
                base.setdefault(each.step, each.index)
            index = counts[key] if each.index is None else each.index - base.get(each.step, 0)
            each.named = each.named._replace(microbatch=index % size)
            counts[key] += 1


def _forwards_of_a_step(ranks: Sequence[Recorded]) -> int:
    """The number of forwards of a rank in a step, as the rank shows it on which most forwards wait for their backwards
    at once. Raises UsageError if no rank has a whole step.
    """
    most = size = 0
    for actions in ranks:
        waiting, sizes = _waiting(actions)
        if waiting > most and sizes:
            most, size = waiting, _usual(sizes)
    if not most:
        raise UsageError(
            "no step is there from its first forward to its last backward: record at least one whole training step"
        )
    return size


def _waiting(actions: Recorded) -> tuple[int, list[int]]:
    """The most forwards that waited for their backwards at once, and the numbers of forwards after which none did."""
    waiting = forwards = most = 0
    sizes: list[int] = []
    last: int | None = None
    for each in sorted(actions, key=attrgetter("start")):
        if each.step != last:
            waiting, forwards, last = 0, 0, each.step
        if each.kind is Kind.F:
            waiting, forwards = waiting + 1, forwards + 1
            most = max(most, waiting)
        elif each.kind in (Kind.B, Kind.I):
            waiting -= 1
            if waiting == 0:
                sizes.append(forwards)
                forwards = 0
    return most, sizes


def give_stages(steps: Sequence[Step]) -> None:
    """Gives each action its stage, if names do not say it. Usually that is its rank. If a named schedule of several
    stages per rank, and none of one, has forwards and backwards in the order that was recorded, it gives the stages.
    """
    nameless = [own for step in steps for own in step if any(each.named.stage is None for each in own)]
    if not nameless:
        return
    fitting = _fitting(steps[0])
    for step in steps:
        for rank, own in enumerate(step):
            actions = None if fitting is None else list(fitting.actions(rank))
            for place, each in enumerate(own):
                if actions is None:
                    each.named = each.named._replace(stage=rank)
                else:
                    each.named = each.named._replace(stage=actions[place].stage, microbatch=actions[place].microbatch)


def _fitting(step: Step) -> Schedule | None:
    """The schedule of several stages per rank that a step shows, if it does."""
    kinds = [[each.kind for each in own] for own in step]
    forwards = kinds[0].count(Kind.F)
    for chunks in (each for each in range(1, forwards + 1) if forwards % each == 0):
        placements = [Placement.looped(len(step), chunks)]
        if chunks == 2 and len(step) > 1:
            placements.append(Placement.vee(len(step)))
        for placement in placements:
            for schedule in schedules_on(placement, forwards // chunks):
                rows = [list(schedule.actions(rank)) for rank in range(len(step))]
                if [[each.kind for each in row] for row in rows] == kinds and all(map(_agrees, step, rows)):
                    return schedule if chunks > 1 else None
    return None


def _agrees(own: Recorded, row: Sequence[Action]) -> bool:
    """Whether backwards belong to the same forwards in a schedule, where operators show these."""
    forwards: dict[int | None, tuple[int, int]] = {}
    for each, action in zip(own, row, strict=True):
        place = action.stage, action.microbatch
        if each.index is not None and forwards.setdefault(each.index, place) != place:
            return False
    return True


def offsets(steps: Sequence[Step], num_stages: int, hosts: Sequence[str]) -> list[float]:
    """Per rank, the seconds to add to its times. None are added to ranks of one machine, whose clock they share, unless
    they contradict it.

    Values that pass between ranks tell how far the clocks of two machines are apart: nothing is used before it was
    made, in either direction. The shortest delay from rank to rank is taken as equal in both directions, so half of the
    difference between the two shortest ones that were measured is the difference between the clocks.
    """
    delays = _shortest(steps, num_stages)
    shifts = [0.0] * len(hosts)
    known, waiting = {0}, [0]
    while waiting:
        rank = waiting.pop()
        for other in range(len(hosts)):
            there, back = delays.get((rank, other)), delays.get((other, rank))
            if other in known or there is None or back is None:
                continue
            known.add(other)
            waiting.append(other)
            apart = hosts[rank] != hosts[other] or not hosts[rank] or min(there, back) < 0
            shifts[other] = shifts[rank] + (back - there) / 2 * apart
    return shifts


def _shortest(steps: Sequence[Step], num_stages: int) -> dict[tuple[int, int], float]:
    """The shortest time from when one rank made a value until another one used it, by (maker, user)."""
    found: dict[tuple[int, int], float] = {}
    for step in steps:
        made: dict[Key, tuple[int, float]] = {}
        for rank, actions in enumerate(step):
            for each in actions:
                made[each.action.kind, each.action.stage, each.action.microbatch] = rank, each.end
        for rank, actions in enumerate(step):
            for each in actions:
                others = [value for value in needs(each.action, num_stages) if value.stage != each.action.stage]
                for key in (key for value in others for key in makers(value)):
                    if key in made and (maker := made[key])[0] != rank:
                        place = maker[0], rank
                        found[place] = min(found.get(place, math.inf), each.start - maker[1])
    return found
