"""Reductions in a row: where the last weight gradient of a stage is, and the reduction after it. Must not contain:
checks of a schedule, and when reductions run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.dataflow import MAKERS, Content


class Last(NamedTuple):
    """The last value of a content that a row makes for a stage.

    Attributes:
        position: index of the entry that makes it.
        microbatch: its microbatch.
    """

    position: int
    microbatch: int


def last_made(row: Sequence[Entry], content: Content = Content.WEIGHT_GRADIENT) -> dict[int, Last]:
    """Per stage, the last value of `content` that `row` makes. Stages without such a value are left out."""
    return {
        action.stage: Last(position, action.microbatch)
        for position, entry in enumerate(row)
        for action in actions_of(entry)
        if action.kind in MAKERS[content]
    }


def is_reduction(entry: Entry) -> TypeGuard[Action]:
    """Whether an entry of a row is a reduction."""
    return isinstance(entry, Action) and entry.kind is Kind.R


def reduced(row: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The row with a reduction directly after the last weight gradient of each stage. Stages that already have a
    reduction keep theirs.
    """
    have = {entry.stage for entry in row if is_reduction(entry)}
    after = {
        last.position: Action(Kind.R, stage, last.microbatch)
        for stage, last in last_made(row).items()
        if stage not in have
    }
    entries: list[Entry] = []
    for position, entry in enumerate(row):
        entries.append(entry)
        if position in after:
            entries.append(after[position])
    return tuple(entries)
