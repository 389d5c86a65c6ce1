"""Cells: the entries of a schedule as tables of torch.distributed.pipelining write them. Must not contain: checks of a
schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeflow.core.action import Action, Entry, Kind, parse_entry
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.errors import ScheduleError
from pipeflow.core.reductions import last_made

WORDS = {flow.word: kind for kind, flow in DATAFLOW.items() if flow.word}
"""The kinds of action that tables write with a word and without a microbatch."""

_CELL = re.compile(rf"(\d{{1,9}})({'|'.join(WORDS)})", re.ASCII)
_COMMUNICATION = re.compile(r"\d{1,9}(SEND|RECV|WAIT_SEND|WAIT_RECV)_[FB]\d{1,9}", re.ASCII)


def cells(row: tuple[Entry, ...]) -> Iterator[str]:
    """The entries of the row as torch.distributed.pipelining writes them. An action that has a word there is written
    without its microbatch if that is the one that `parse_cell` gives it.
    """
    for position, entry in enumerate(row):
        yield (
            _with_word(entry, row[:position]) if isinstance(entry, Action) and DATAFLOW[entry.kind].word else str(entry)
        )


def _with_word(action: Action, before: Sequence[Entry]) -> str:
    is_usual = _microbatch(action.kind, action.stage, before) == action.microbatch
    return f"{action.stage}{DATAFLOW[action.kind].word}" if is_usual else str(action)


def is_communication(text: str) -> bool:
    """Whether a cell of a lowered table sends or receives, and so is none of the schedule."""
    return _COMMUNICATION.fullmatch(text) is not None


def parse_cell(text: str, before: Sequence[Entry]) -> Entry:
    """Reads one cell of a table that follows the entries `before`. Raises ScheduleError if it is neither an action nor
    a pair.
    """
    match = _CELL.fullmatch(text)
    if match is None:
        return parse_entry(text)
    stage, kind = int(match[1]), WORDS[match[2]]
    microbatch = _microbatch(kind, stage, before)
    if microbatch is None:
        raise ScheduleError(f"{text} comes before any weight gradient of its stage: put it after {stage}B or {stage}W")
    return Action(kind, stage, microbatch)


def _microbatch(kind: Kind, stage: int, before: Sequence[Entry]) -> int | None:
    """The microbatch of an action that is written without one: of a joint action, that of the last value that it waits
    for, if there is one; of another, its number among those of its kind and stage.
    """
    if not DATAFLOW[kind].joint:
        return sum(isinstance(each, Action) and (each.kind, each.stage) == (kind, stage) for each in before)
    [(content, _)] = DATAFLOW[kind].needs
    last = last_made(before, content).get(stage)
    return None if last is None else last.microbatch
