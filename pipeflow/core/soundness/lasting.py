"""Lasting values: what is wrong with the unshards and reshards of a schedule, and with the actions that run between
them. Must not contain: when they run.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.core.action import Action, actions_of
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.errors import Violation
from pipeflow.core.rows import ENDING, HANDLING, MAKING, Lasting
from pipeflow.core.schedule import Schedule


def wrong_lasting(schedule: Schedule) -> Iterator[Violation]:
    """Every violation of the lasting values of a schedule, such as whole weights. In a row, a stage has one such value
    at a time, and what makes it is ended by the action of its number. If a row makes the value for a stage, all actions
    that can run within it do so: others would need it twice.
    """
    for rank, row in enumerate(() if HANDLING.isdisjoint(schedule.kinds) else schedule.rows):
        actions = [(position, action) for position, entry in enumerate(row) for action in actions_of(entry)]
        yield from _LastingRow(rank, actions).violations()


class _LastingRow:
    def __init__(self, rank: int, actions: list[tuple[int, Action]]) -> None:
        self.rank = rank
        self.actions = actions
        self.handled = {
            (content, action.stage)
            for _, action in actions
            for content in (MAKING.get(action.kind), ENDING.get(action.kind))
            if content
        }
        self.there: dict[Lasting, tuple[int, Action]] = {}
        self.outside: set[Lasting] = set()  # told since the last value ended

    def violations(self) -> Iterator[Violation]:
        seen: set[Action] = set()
        for position, action in self.actions:
            if (content := MAKING.get(action.kind)) is not None:
                yield from self._made((content, action.stage), position, action, again=action in seen)
                seen.add(action)
            elif (content := ENDING.get(action.kind)) is not None:
                yield from self._ended((content, action.stage), position, action)
            elif (content := DATAFLOW[action.kind].within) is not None:
                yield from self._within((content, action.stage), position, action)
        for key, (position, action) in self.there.items():
            wanted = f"{_ending(key, action)} after the last action of stage {key[1]}"
            yield self._wrong(f"{action} is never ended", wanted, position)

    def _made(self, key: Lasting, position: int, action: Action, *, again: bool) -> Iterator[Violation]:
        if key in self.there:
            before = self.there[key][1]
            yield self._wrong(f"{action} comes while {before} lasts", f"{_ending(key, before)} before it", position)
        elif again:
            yield self._wrong(f"{action} runs again", "another number for each of a stage", position)
        self.there[key] = position, action
        self.outside.discard(key)

    def _ended(self, key: Lasting, position: int, action: Action) -> Iterator[Violation]:
        if key not in self.there:
            yield self._wrong(f"{action} ends nothing", f"{_making(key, action)} before it", position)
            return
        _, made = self.there.pop(key)
        if made.microbatch != action.microbatch:
            yield self._wrong(f"{action} is wrong here", f"{_ending(key, made)}, the end of {made}", position)

    def _within(self, key: Lasting, position: int, action: Action) -> Iterator[Violation]:
        if key in self.handled and key not in self.there and key not in self.outside:
            self.outside.add(key)
            content, stage = key
            problem = f"{action} runs without the {content} of stage {stage}"
            yield self._wrong(problem, "it after what makes them and before what ends them", position)

    def _wrong(self, problem: str, expected: str, position: int) -> Violation:
        return Violation(problem, expected, self.rank, position)


def _making(key: Lasting, action: Action) -> Action:
    return Action(next(kind for kind, content in MAKING.items() if content is key[0]), key[1], action.microbatch)


def _ending(key: Lasting, action: Action) -> Action:
    return Action(next(kind for kind, content in ENDING.items() if content is key[0]), key[1], action.microbatch)
