"""Steps: the actions of each rank, divided into steps, each action with its microbatch. Must not contain: what
annotations mean, and the stages that they do not say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.traces.recorded import RecordedAction

Step = list[list[RecordedAction]]  # per rank


def steps_of(ranks: Sequence[Sequence[RecordedAction]]) -> list[Step]:
    """The steps that all ranks recorded whole. Where names have microbatches, a step begins with the first action that
    the step before has already. Otherwise actions are counted: a step ends where a rank has run the backwards of all
    its forwards.
    """
    if any(each.named.microbatch is None for actions in ranks for each in actions):
        _number(ranks)
    parts = [_divided(actions) for actions in ranks]
    usual = [Counter(map(len, steps)).most_common(1)[0][0] for steps in parts]
    whole = [[step for step in steps if len(step) == size] for steps, size in zip(parts, usual, strict=True)]
    number = min(map(len, whole))
    return [[steps[len(steps) - number + index] for steps in whole] for index in range(number)]


def _divided(actions: Sequence[RecordedAction]) -> list[list[RecordedAction]]:
    steps: list[list[RecordedAction]] = []
    seen: set[object] = set()
    for each in actions:
        if not steps or each.named in seen:
            steps.append([])
            seen = set()
        seen.add(each.named)
        steps[-1].append(each)
    return steps


def _number(ranks: Sequence[Sequence[RecordedAction]]) -> None:
    """Gives each action its microbatch: actions of a kind and stage are in the order of microbatches, unless operators
    show which backward belongs to which forward.
    """
    for actions in ranks:
        counts: defaultdict[object, int] = defaultdict(int)
        for each in actions:
            key = each.named.kind, each.named.stage
            if each.index is None:
                each.index = counts[key]
            counts[key] += 1
    size = min(map(_forwards_of_a_step, ranks), key=lambda found: (-found[0], found[1]))[1]
    for actions in ranks:
        for each in actions:
            assert each.index is not None
            each.named = each.named._replace(microbatch=each.index % size)


def _forwards_of_a_step(actions: Sequence[RecordedAction]) -> tuple[int, int]:
    """The most forwards that waited for their backwards at once, and the number of forwards in a step, as far as this
    rank shows it: those after which none waited.
    """
    waiting = forwards = most = 0
    sizes: list[int] = []
    for each in actions:
        if each.named.kind is Kind.F:
            waiting, forwards = waiting + 1, forwards + 1
            most = max(most, waiting)
        elif each.named.kind in (Kind.B, Kind.I):
            waiting -= 1
            if waiting == 0:
                sizes.append(forwards)
                forwards = 0
    if not sizes:
        raise UsageError(
            "no step is there from its first forward to its last backward: record at least one whole training step"
        )
    return most, Counter(sizes).most_common(1)[0][0]
