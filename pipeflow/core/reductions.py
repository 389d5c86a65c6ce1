"""Reductions in a row: where a stage's weight gradients are all there, and how tables write them. What must not live
here: what is right, and when they run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

from pipeflow.core.action import Action, Entry, Kind, actions_of, parse_entry
from pipeflow.core.dataflow import MAKERS, Content
from pipeflow.core.errors import ScheduleError

_CELL = re.compile(r"(\d{1,9})REDUCE_GRAD", re.ASCII)


class Last(NamedTuple):
    """The last value of a stage in a row, of one content: the position of the entry that makes it, its microbatch."""

    position: int
    microbatch: int


def last_made(row: Sequence[Entry], content: Content = Content.WEIGHT_GRADIENT) -> dict[int, Last]:
    """Per stage of which `row` makes values of a content, the last one."""
    return {
        action.stage: Last(position, action.microbatch)
        for position, entry in enumerate(row)
        for action in actions_of(entry)
        if action.kind in MAKERS[content]
    }


def is_reduction(entry: Entry) -> TypeGuard[Action]:
    """Whether a row's entry is a reduction."""
    return isinstance(entry, Action) and entry.kind is Kind.R


def reduced(row: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The row with a reduction right after each stage's last weight gradient; stages that have one keep theirs."""
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


def cells(row: tuple[Entry, ...]) -> Iterator[str]:
    """The row's entries as torch.distributed.pipelining writes them: a reduction without its microbatch, where that is
    the one of its stage's last weight gradient so far.
    """
    for position, entry in enumerate(row):
        if is_reduction(entry):
            last = last_made(row[:position]).get(entry.stage)
            if last is not None and last.microbatch == entry.microbatch:
                yield f"{entry.stage}REDUCE_GRAD"
                continue
        yield str(entry)


def parse_cell(text: str, before: Sequence[Entry]) -> Entry:
    """Reads one cell of a table, which stands after the entries `before`. Raises ScheduleError for what is none."""
    match = _CELL.fullmatch(text)
    if match is None:
        return parse_entry(text)
    stage = int(match[1])
    last = last_made(before).get(stage)
    if last is None:
        raise ScheduleError(f"{text} stands before any weight gradient of its stage: put it after {stage}B or {stage}W")
    return Action(Kind.R, stage, last.microbatch)
