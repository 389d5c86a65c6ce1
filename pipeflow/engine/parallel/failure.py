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
from typing import Any, Protocol
from weakref import WeakSet

from pipeflow.core.action import Action
from pipeflow.core.errors import Failure, PipeflowError, PipelineError, UsageError, error_of
from pipeflow.engine.parallel.transport.protocol import LinkError, Transport

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


class Alarm:
    """Reports failures between the ranks of a world; there is one per world.

    Args:
        transport: the transport of the world, which spreads the failure.

    Attributes:
        holders: objects that are asked to drop the transport's channels before these are closed.
    """

    def __init__(self, transport: Transport) -> None:
        self.holders: WeakSet[ChannelHolder] = WeakSet()
        self._transport = transport
        self._dead: Failure | None = None
        self._number = 0  # of the call that all ranks make together

    @contextmanager
    def raised_everywhere(self, call: object = "") -> Iterator[None]:
        """Wraps a call that all ranks make together: an error in it on any rank is raised on every rank.

        `call`, as a string, describes this rank's call. It appears in the error if ranks make different calls, as in a
        `RankPlace`.

        On the rank where the error happened, pipeflow's own errors and interruptions are raised unchanged; any other
        error becomes the cause of a PipelineError. All other ranks raise that PipelineError, which is a UsageError as
        well if the error was one, and so does this rank if its batch or call, which are others, explain the error. The
        next call then starts afresh, unless a rank died: then every further call raises the same error.
        """
        if self._dead is not None:
            raise PipelineError(self._dead)
        transport, place = self._transport, self._transport.place
        outside = place.patience, place.call
        place.patience, place.call = transport.timeout, ""
        self._number += 1
        try:
            transport.reopen()
            transport.enter(self._number)
            place.call = call  # after its number, since ranks compare calls of the same number
            yield
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, ActionError) else error
            first = transport.report(error if isinstance(error, LinkError) else self._locate(error))
            for holder in self.holders:
                holder.forget()
            if first.died is not None:
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
