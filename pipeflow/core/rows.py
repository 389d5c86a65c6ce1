"""Rows: what follows from the entries of the rows of a schedule: the placement, where the last weight gradient of a
stage is and the reduction after it, values that serve all actions of their stage such as whole weights, and the cells
of tables of torch.distributed.pipelining. Must not contain: checks of a schedule.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeflow.core.action import Action, Entry, Kind, actions_of, parse_entry
from pipeflow.core.dataflow import DATAFLOW, LASTING, MAKERS, SEVERAL, Content, Value
from pipeflow.core.errors import ScheduleError
from pipeflow.core.placement import Placement


def placement_of(rows: Sequence[Sequence[Entry]]) -> Placement | None:
    """The placement in which every action is in the row of its stage's rank: that with the fewest paths, of which
    microbatch m takes path m modulo their number. More than two paths are recognized by their second microbatches.

    Returns None if there is no such placement: a stage has no action, a rank has no stage, or the ranks of a stage do
    not repeat.
    """
    holders = defaultdict[int, dict[int, int]](dict)  # per microbatch, the ranks of its stages
    for rank, row in enumerate(rows):
        for action in (action for entry in row for action in actions_of(entry)):
            if action.kind not in SEVERAL and holders[action.microbatch].setdefault(action.stage, rank) != rank:
                return None  # actions of several microbatches count for none
    stages = range(max((stage for held in holders.values() for stage in held), default=-1) + 1)
    microbatches = range(max(holders, default=0) + 1)
    ranks = [tuple(holders[microbatch].get(stage) for stage in stages) for microbatch in microbatches]
    for number in range(1, max(2, len(ranks) // 2) + 1):
        paths = [_path(set(ranks[first::number])) for first in range(number)]
        if all(paths) and {rank for path in paths for rank in path} == {*range(len(rows))}:
            return Placement(tuple(paths))
    return None


def _path(seen: set[tuple[int | None, ...]]) -> tuple[int, ...]:
    """The rank of each stage, of microbatches of which each may lack some; empty unless each stage has one rank."""
    held = [{rank for rank in ranks if rank is not None} for ranks in zip(*seen, strict=True)]
    return tuple(rank for ranks in held for rank in ranks) if all(len(ranks) == 1 for ranks in held) else ()


class Last(NamedTuple):
    """The last value of a content that a row makes for a stage.

    Attributes:
        position: index of the entry that makes it.
        microbatch, slice: those of the action that makes it.
    """

    position: int
    microbatch: int
    slice: int | None = None

    def used_by(self, kind: Kind, stage: int) -> Action:
        """The action of a kind on its stage that uses it."""
        return Action(kind, stage, self.microbatch, self.slice)


def last_made(row: Sequence[Entry], content: Content = Content.WEIGHT_GRADIENT) -> dict[int, Last]:
    """Per stage, the last value of `content` that `row` makes. Stages without such a value are left out."""
    return {
        action.stage: Last(position, action.microbatch, action.slice)
        for position, entry in enumerate(row)
        for action in actions_of(entry)
        if action.kind in MAKERS[content]
    }


def reduced(row: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The row with a reduction directly after the last weight gradient of each stage. Stages that already have a
    reduction keep theirs.
    """
    have = {action.stage for entry in row for action in actions_of(entry) if action.kind is Kind.R}
    after = {
        last.position: (last.used_by(Kind.R, stage),) for stage, last in last_made(row).items() if stage not in have
    }
    return tuple(each for position, entry in enumerate(row) for each in (entry, *after.get(position, ())))


Lasting = tuple[Content, int]  # content and stage

MAKING = {kind: content for content in LASTING for kind in MAKERS[content]}
"""The kinds of action that make a lasting content."""
ENDING = {kind: content for content in LASTING for kind, flow in DATAFLOW.items() if (content, 0) in flow.needs}
"""The kinds of action that end one."""
HANDLING = frozenset(MAKING) | frozenset(ENDING)
"""Both."""


def first_uses(actions: Iterable[Action]) -> dict[Action, Value]:
    """Per action of a row that is the first to run within a lasting value, this value. The action waits for it, and
    leaves it to the actions after it, which need not wait.
    """
    fresh: dict[Lasting, Value] = {}
    found: dict[Action, Value] = {}
    for action in actions:
        kind, stage = action.kind, action.stage
        if kind in MAKING:
            fresh[MAKING[kind], stage] = Value(MAKING[kind], stage, action.microbatch)
        elif kind in ENDING:
            fresh.pop((ENDING[kind], stage), None)
        elif (within := DATAFLOW[kind].within) and (value := fresh.pop((within, stage), None)):
            found[action] = value
    return found


WORDS = {flow.word: kind for kind, flow in DATAFLOW.items() if flow.word}
"""The kinds of action that tables write with a word and without a microbatch."""

_CELL = re.compile(rf"(\d{{1,9}})({'|'.join(WORDS)})", re.ASCII)
_COMMUNICATION = re.compile(r"\d{1,9}((SEND|RECV|WAIT_SEND|WAIT_RECV)_[FB]\d{1,9}|WAIT_REDUCE_GRAD)", re.ASCII)


def cells(row: tuple[Entry, ...]) -> Iterator[str]:
    """The entries of the row as torch.distributed.pipelining writes them. An action that has a word there is written
    without its microbatch if that is the one that `parse_cell` gives it.
    """
    for position, entry in enumerate(row):
        word = DATAFLOW[entry.kind].word if isinstance(entry, Action) else ""
        if isinstance(entry, Action) and word:
            is_usual = _of_word(entry.kind, entry.stage, row[:position]) == entry
            yield f"{entry.stage}{word}" if is_usual else str(entry)
        else:
            yield str(entry)


def is_communication(text: str) -> bool:
    """Whether a cell of a lowered table sends, receives or waits, and so is none of the schedule."""
    return _COMMUNICATION.fullmatch(text) is not None


def parse_cell(text: str, before: Sequence[Entry]) -> Entry:
    """Reads one cell of a table that follows the entries `before`. Raises ScheduleError if it is neither an action nor
    a pair.
    """
    match = _CELL.fullmatch(text)
    if match is None:
        return parse_entry(text)
    stage, kind = int(match[1]), WORDS[match[2]]
    action = _of_word(kind, stage, before)
    if action is None:
        raise ScheduleError(f"{text} comes before any weight gradient of its stage: put it after {stage}B or {stage}W")
    return action


def _of_word(kind: Kind, stage: int, before: Sequence[Entry]) -> Action | None:
    """An action that is written without a microbatch. A joint action has that of the last value that it waits for, if
    there is one; another has its number among those of its kind and stage.
    """
    if not DATAFLOW[kind].joint:
        number = sum(isinstance(each, Action) and (each.kind, each.stage) == (kind, stage) for each in before)
        return Action(kind, stage, number)
    [(content, _)] = DATAFLOW[kind].needs
    last = last_made(before, content).get(stage)
    return None if last is None else last.used_by(kind, stage)
