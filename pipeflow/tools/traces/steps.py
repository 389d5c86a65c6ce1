"""Steps: the actions of each rank, divided into steps, each action with its microbatch and stage, also where no name
says them. Must not contain: what annotations mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import schedules_on
from pipeflow.tools.traces.actions import RecordedAction

Step = list[list[RecordedAction]]  # per rank
Part = list[RecordedAction]  # of one step, on one rank
Label = tuple[int, int]  # number of a step that the profiler marks, and which of the steps in it


class Steps(NamedTuple):
    """The steps of a recording.

    Attributes:
        whole: those that all ranks recorded whole; if there is none, the one with most actions.
        damaged: number of steps that all ranks recorded, but not whole.
    """

    whole: list[Step]
    damaged: int


def steps_of(ranks: Sequence[Sequence[RecordedAction]]) -> Steps:
    """Divides the actions of all ranks. Where names have microbatches, a step begins with the first action that the
    step before has already. Otherwise actions are counted: a step ends where a rank has run the backwards of all its
    forwards. A step never goes on in the next step of the profiler, if these are marked.
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
    return Steps(whole or most, len(steps) - len(whole or most))


def _usual(sizes: Sequence[int] | map[int]) -> int:
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size))


def _are_counted(ranks: Sequence[Sequence[RecordedAction]]) -> bool:
    """Whether names do not say the microbatches, or not which of several stages of a rank has them."""
    named = [each.named for actions in ranks for each in actions]
    if any(each.microbatch is None for each in named):
        return True
    if all(each.stage is not None for each in named):
        return False
    return _forwards_of_a_step(ranks) > len({each.microbatch for each in named})


def _divided(actions: Sequence[RecordedAction]) -> list[Part]:
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


def _number(ranks: Sequence[Sequence[RecordedAction]], size: int) -> None:
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


def _forwards_of_a_step(ranks: Sequence[Sequence[RecordedAction]]) -> int:
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


def _waiting(actions: Sequence[RecordedAction]) -> tuple[int, list[int]]:
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
        for placement in _placements(len(step), chunks):
            for schedule in schedules_on(placement, forwards // chunks):
                rows = [list(schedule.actions(rank)) for rank in range(len(step))]
                if [[each.kind for each in row] for row in rows] == kinds and all(map(_agrees, step, rows)):
                    return schedule if chunks > 1 else None
    return None


def _placements(ranks: int, chunks: int) -> Iterator[Placement]:
    yield Placement.looped(ranks, chunks)
    if chunks == 2 and ranks > 1:
        yield Placement.vee(ranks)


def _agrees(own: Sequence[RecordedAction], row: Sequence[Action]) -> bool:
    """Whether backwards belong to the same forwards in a schedule, where operators show these."""
    forwards: dict[int | None, tuple[int, int]] = {}
    for each, action in zip(own, row, strict=True):
        place = action.stage, action.microbatch
        if each.index is not None and forwards.setdefault(each.index, place) != place:
            return False
    return True
