"""Liveness: what an action keeps on its rank and what it lets go of, and when. Read off the table of `dataflow`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from pipeflow.core.dataflow import DATAFLOW, KEPT, Content, Flow
from pipeflow.core.span import Row

Curve = tuple[tuple[float, float], ...]  # (time, amount from then on), in order of time


class Change(NamedTuple):
    """What one kind of action keeps from its start on, what from its end on, and what it lets go of at its end."""

    from_start: tuple[Content, ...]
    from_end: tuple[Content, ...]
    frees: tuple[Content, ...]

    @classmethod
    def of(cls, flow: Flow) -> Change:
        made = tuple(content for content, _ in flow.makes if content in KEPT)
        used = tuple(content for content, _ in flow.needs if content in KEPT)
        return cls((), made, used) if flow.in_place else cls(made, (), used)

    def net(self, content: Content) -> int:
        """By how many values of a content there are more after the action than before it."""
        return (self.from_start + self.from_end).count(content) - self.frees.count(content)


CHANGES = {kind: Change.of(flow) for kind, flow in DATAFLOW.items()}
ACTIVATIONS = {kind: change.net(Content.SAVED) for kind, change in CHANGES.items()}
"""By how many activations more a rank keeps after an action than before it."""


def kept(row: Row, sizes: Mapping[Content, Sequence[float]]) -> Curve:
    """What a rank keeps while it runs `row`, where `sizes` has per content the amount of each stage. What no action of
    the row uses, as activations without backwards, is there while it is made, and then no more.
    """
    kinds = {span.action.kind for span in row}
    used = frozenset(content for kind in kinds for content in CHANGES[kind].frees)
    table = {kind: _amounts(CHANGES[kind], used, sizes) for kind in kinds}
    changes: list[tuple[float, float]] = []
    for span in row:
        at_start, at_end = table[span.action.kind]
        if at_start:
            changes.append((span.start, at_start[span.action.stage]))
        if at_end:
            changes.append((span.end, at_end[span.action.stage]))
    return _added_up(sorted(changes, key=itemgetter(0)))


def _amounts(
    change: Change, used: frozenset[Content], sizes: Mapping[Content, Sequence[float]]
) -> tuple[list[float], list[float]]:
    """Per stage, how much more there is from an action's start on, and from its end on; empty where nothing changes."""
    frees = (*change.frees, *(content for content in change.from_start if content not in used))
    begins = [sizes[content] for content in change.from_start if content in sizes]
    comes = [sizes[content] for content in change.from_end if content in sizes and content in used]
    goes = [sizes[content] for content in frees if content in sizes]
    stages = range(max(map(len, sizes.values()), default=0))
    at_end = [sum(size[stage] for size in comes) - sum(size[stage] for size in goes) for stage in stages]
    return [sum(size[stage] for size in begins) for stage in stages] if begins else [], at_end if comes or goes else []


def _added_up(changes: list[tuple[float, float]]) -> Curve:
    """The changes added up; those of one moment are one."""
    curve: list[tuple[float, float]] = []
    amount = 0.0
    for time, change in changes:
        amount += change
        if curve and curve[-1][0] == time:
            curve.pop()
        if not curve or curve[-1][1] != amount:
            curve.append((time, amount))
    return tuple(curve)
