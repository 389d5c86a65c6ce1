"""Failure: raises an error of one rank on every rank, prepares the next step after it, and shows it once when it ends
the script: the rank on which it was raised writes it whole, and the others write a line.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

from pipeflow.core.action import Action
from pipeflow.core.errors import Failure, PipeflowError, PipelineError, UsageError, error_of
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.engine.parallel.transport.protocol import LinkError, Subset, Transport

T = TypeVar("T")
_SLOWER = 10.0  # factor of the timeout


class ActionError(Exception):
    """An error inside an action: `__cause__` is the error, `action` the action in which it happened."""

    def __init__(self, action: Action) -> None:
        super().__init__(str(action))
        self.action = action


class ChannelHolder(Protocol):
    """An object that holds channels of a transport."""

    def forget(self) -> None:
        """Drops the channels, because they are broken."""


class Member(Protocol):
    """An object that all ranks made together, and that goes on without ranks that have died."""

    def join(self) -> None:
        """Prepares to go on with the ranks of the context; all of them call it together. It may be called again."""


class Alarm:
    """Reports failures between the ranks of a world; there is one per world.

    Args:
        transport: the transport of the world, which spreads the failure.

    Attributes:
        holders: objects that are asked to drop the transport's channels before these are closed.
        members: objects that go on without ranks that have died, by the order in which all ranks made them.
        survive: of an elastic world, changes the context to that of these ranks of the transport, those that are left.
            Raises UsageError if they cannot go on. None in another world.
    """

    def __init__(self, transport: Transport) -> None:
        self.holders: WeakSet[ChannelHolder] = WeakSet()
        self._transport = transport
        self._dead: Failure | None = None
        self._number = 0  # of the call that all ranks make together
        self.members: WeakValueDictionary[int, Member] = WeakValueDictionary()
        self.survive: Callable[[tuple[int, ...]], None] | None = None
        self._living = transport.living  # as the context and the members know it
        self.ahead: list[int] = []  # of the ranks that are left, when some died: those in the latest call
        self._ended: object = None  # what all ranks told each other in the last call, if it can be ended with that
        self._told: object = None  # the same of this call, by a rank that has ended it

    def run(self, call: object, run: Callable[[], tuple[T, object]], end: Callable[[Any], T]) -> T:
        """Runs a call that all ranks make together, as inside `raised_everywhere`. If a rank of an elastic world dies,
        the ranks that are left run it again.

        `run()` returns the result and what all ranks told each other at its end, a plain value. Some ranks may have
        ended the call when a rank dies, so the others end it with `end(told)`, where they would have.
        """
        is_again = False
        while True:
            try:
                with self._everywhere(call, is_again=is_again):
                    result, told = run() if self._told is None else (end(self._told), self._told)
            except PipelineError as error:
                if self.survive is None or self._dead is not None or error.failure.died is None or error.failure.left:
                    raise
                is_again = True
            else:
                self._ended = told
                return result

    def add(self, member: Member) -> None:
        """Adds a member, at the end of the call in which all ranks made it."""
        self.members[self._number] = member

    def _join(self) -> None:
        """Goes on with the ranks that are left. Those that are in an earlier call than others get what these told each
        other at its end.
        """
        living = self._transport.living
        if living == self._living:
            return
        self.expect_slow()
        assert self.survive is not None
        try:
            self.survive(living)
        except UsageError as error:
            died = next(rank for rank in self._living if rank not in living)
            self._dead = Failure(died, str(error), died=died)
            raise PipelineError(self._dead) from None
        mine = (self._number, self._ended, sorted(self.members))
        everyone: list[Any] = all_gather_object(Subset(self._transport, living), mine)
        latest = max(number for number, *_ in everyone)
        self.ahead = [rank for rank, (number, *_) in enumerate(everyone) if number == latest]
        if latest > self._number:
            self._told = everyone[self.ahead[0]][1]
        for number in sorted(set(everyone[0][2]).intersection(*(numbers for *_, numbers in everyone))):
            self.members[number].join()
        self._living = living

    def _meet(self) -> tuple[None, object]:
        all_gather(Subset(self._transport, self._transport.living), [0.0])
        return None, True

    @contextmanager
    def raised_everywhere(self, call: object = "") -> Iterator[None]:
        """Wraps a call that all ranks make together: an error in it on any rank is raised on every rank.

        `call`, as a string, describes this rank's call. It appears in the error if ranks make different calls, as in a
        `RankPlace`.

        On the rank where the error happened, pipeflow's own errors and interruptions are raised unchanged; any other
        error becomes the cause of a PipelineError. All other ranks raise that PipelineError, which is a UsageError as
        well if the error was one, and so does this rank if its batch or call, which are others, explain the error. The
        next call then starts afresh, unless a rank died: then every further call raises the same error. In an elastic
        world, ranks that died before this call are no error.
        """
        if self.survive is not None:
            self.run(call, self._meet, lambda _: None)
        with self._everywhere(call):
            yield

    @contextmanager
    def _everywhere(self, call: object, *, is_again: bool = False) -> Iterator[None]:
        """The inner part of a call, which may be the last call once more (`is_again`)."""
        if self._dead is not None:
            raise PipelineError(self._dead)
        transport, place = self._transport, self._transport.place
        outside = place.patience, place.call
        place.patience, place.call = transport.timeout, ""
        self._number += not is_again
        self._told = None
        try:
            transport.reopen()
            transport.enter(self._number)
            place.call = call  # after its number, since ranks compare calls of the same number
            self._join()
            yield
            self._ended = None
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, ActionError) else error
            first = transport.report(error if isinstance(error, LinkError) else self._locate(error))
            for holder in self.holders:
                holder.forget()
            if first.died is not None and (self.survive is None or first.left):
                self._dead = first
            is_usage = isinstance(error, ActionError) and isinstance(cause, UsageError)
            is_explained = is_usage and first.rank == transport.rank and _reason(cause or error) != first.reason
            if not is_explained and (isinstance(cause, PipeflowError) or not isinstance(cause, Exception)):
                if isinstance(error, ActionError):  # it would be in the chain of its own cause
                    error.__cause__ = error.__context__ = None
                if isinstance(cause, PipeflowError) and _reason(cause) == first.reason:
                    cause.first = first
                raise (cause or error) from None
            told = error_of(first)
            told.first = first
            raise told from (None if isinstance(error, LinkError) else cause)
        finally:
            place.patience, place.call = outside

    def expect_slow(self) -> None:
        """Makes other ranks wait ten times as long for this rank in the current call, because it compiles first."""
        self._transport.place.patience = self._transport.timeout * _SLOWER

    def _locate(self, error: BaseException) -> Failure:
        found = Failure(self._transport.rank, _reason(error), number=self._number)
        cause = error
        if isinstance(error, ActionError):
            assert error.__cause__ is not None
            action, cause = error.action, error.__cause__
            found = replace(found, action=str(action), stage=action.stage, microbatch=action.microbatch)
        return replace(found, reason=_reason(cause), trace=_trace(cause), usage=isinstance(cause, UsageError))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _trace(error: BaseException) -> str:
    """The traceback of the failing rank, for the other ranks; pipeflow's own errors need none."""
    return "" if isinstance(error, PipeflowError) else "".join(traceback.format_exception(error))


_LONGEST = 100  # characters of the error that a line has
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_NO_OUTPUTS = "Output.outputs is None without return_outputs=True, and on ranks without the last stage"
_NO_LOSS = "Output.loss is None on ranks without the last stage: format it there, or pass broadcast_loss=True"

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def write_once(rank: int) -> None:
    """Lets this process, which is `rank` of a world of several, write as this file says. May be called again."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook, rank)


class _Hook:
    """Takes the place of `sys.excepthook`, the hook `before`. With `python -X dev` it changes nothing."""

    def __init__(self, before: Hook, rank: int) -> None:
        self._before = before
        self._rank = rank

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not sys.flags.dev_mode:
            first: Failure | None = getattr(error, "first", None)
            if first is not None and first.rank != self._rank and first.number is not None:  # that rank raised it
                text = next(iter(first.reason.splitlines()), "")
                text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
                sys.stderr.write(f"rank {self._rank} ends, since rank {first.rank} failed: {text}\n")
                return
            if isinstance(error, UsageError) and not isinstance(error, PipelineError):
                _leave_own_frames_out(traceback)
            for note in _notes(str(error), traceback):
                error.add_note(note)
        self._before(kind, error, traceback)


def _leave_own_frames_out(traceback: TracebackType | None) -> None:
    """Ends a traceback of pipeflow's own error with the last line of the caller."""
    last, frame = None, traceback
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            last = frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None


def _notes(said: str, traceback: TracebackType | None) -> Iterator[str]:
    """Why a result of a step is None, if an error is about None and its code reads an attribute of that name."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    names = () if traceback is None else traceback.tb_frame.f_code.co_names
    if "format string passed to NoneType" in said and "loss" in names:
        yield _NO_LOSS
    if "'NoneType' object" in said and "outputs" in names:
        yield _NO_OUTPUTS
