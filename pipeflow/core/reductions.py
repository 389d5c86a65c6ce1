"""Reductions in a row: where the last weight gradient of a stage is, and how tables write reductions. Must not contain:
checks of a schedule, and when reductions run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

from pipeflow.core.action import Action, Entry, Kind, actions_of, parse_entry
from pipeflow.core.dataflow import MAKERS, Content
from pipeflow.core.errors import ScheduleError

_CELL = re.compile(r"(\d{1,9})REDUCE_GRAD", re.ASCII)
_COMMUNICATION = re.compile(r"\d{1,9}(UNSHARD|RESHARD|(SEND|RECV|WAIT_SEND|WAIT_RECV)_[FB]\d{1,9})", re.ASCII)


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


def cells(row: tuple[Entry, ...]) -> Iterator[str]:
    """The entries of the row as torch.distributed.pipelining writes them. A reduction is written without its microbatch
    if that is the microbatch of its stage's last weight gradient so far.
    """
    for position, entry in enumerate(row):
        if is_reduction(entry):
            last = last_made(row[:position]).get(entry.stage)
            if last is not None and last.microbatch == entry.microbatch:
                yield f"{entry.stage}REDUCE_GRAD"
                continue
        yield str(entry)


def is_communication(text: str) -> bool:
    """Whether a cell of a lowered table moves data between ranks, and so is none of the schedule."""
    return _COMMUNICATION.fullmatch(text) is not None


def parse_cell(text: str, before: Sequence[Entry]) -> Entry:
    """Reads one cell of a table that follows the entries `before`. Raises ScheduleError if it is neither an action nor
    a pair.
    """
    match = _CELL.fullmatch(text)
    if match is None:
        return parse_entry(text)
    stage = int(match[1])
    last = last_made(before).get(stage)
    if last is None:
        raise ScheduleError(f"{text} comes before any weight gradient of its stage: put it after {stage}B or {stage}W")
    return Action(Kind.R, stage, last.microbatch)
