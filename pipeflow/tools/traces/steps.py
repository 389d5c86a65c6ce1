"""Steps: the actions of all ranks divided into steps, each with its microbatch, also where no name says it; and how far
the clocks of ranks are apart. Must not contain: stages that no name says.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Key, makers, needs
from pipeflow.core.errors import UsageError
from pipeflow.tools.traces.action_names import RecordedAction

Recorded = Sequence[RecordedAction]  # of a rank
Step = list[list[RecordedAction]]  # per rank
Part = list[RecordedAction]  # of one step, on one rank
Label = tuple[int, int]  # number of a step that the profiler marks, and which of the steps in it


def steps_of(ranks: Sequence[Recorded]) -> tuple[list[Step], int]:
    """Divides the actions of all ranks into steps. Returns those that all ranks recorded whole, in the order of most of
    them, or if there is none, the one with most actions; and how many others all ranks recorded.

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
    orders = Counter(map(_order, whole)).most_common(1)
    whole = [step for step in whole if _order(step) == orders[0][0]]
    most = sorted(steps, key=lambda step: sum(map(len, step)))[-1:]
    return whole or most, len(steps) - len(whole or most)


def _order(step: Step) -> tuple[object, ...]:
    return tuple(tuple((each.kind, each.named) for each in own) for own in step)


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


def offsets(steps: Sequence[Step], num_stages: int, hosts: Sequence[str]) -> list[float]:
    """Per rank, the seconds to add to its times. None are added to ranks of one machine, whose clock they share, unless
    they contradict it.

    Values that pass between ranks tell how far the clocks of two machines are apart: nothing is used before it was
    made, in either direction. The shortest delay from rank to rank is taken as equal in both directions, so half of the
    difference between the two shortest ones that were measured is the difference between the clocks.
    """
    delays = shortest(steps, num_stages)
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


def shortest(steps: Sequence[Step], num_stages: int) -> dict[tuple[int, int], float]:
    """The shortest time from when one rank made a value until another one used it, by (maker, user)."""
    found: dict[tuple[int, int], float] = {}
    for step in steps:
        made: dict[Key, tuple[int, float]] = {}
        for rank, actions in enumerate(step):
            for each in actions:
                made[each.action.kind, *each.action.work] = rank, each.end
        for rank, actions in enumerate(step):
            for each in actions:
                others = [value for value in needs(each.action, num_stages) if value.stage != each.action.stage]
                for key in (key for value in others for key in makers(value)):
                    if key in made and (maker := made[key])[0] != rank:
                        place = maker[0], rank
                        found[place] = min(found.get(place, math.inf), each.start - maker[1])
    return found
