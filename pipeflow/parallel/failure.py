"""Failure: how an error on one rank becomes the same error on every rank, and how the next step starts afresh."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakSet

from pipeflow.core.action import Action
from pipeflow.core.errors import Failure, PipeflowError, PipelineError
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.parallel.transport.work import LinkError


class ActionError(Exception):
    """Carries an error, its cause, out of the action that it happened in."""

    def __init__(self, action: Action) -> None:
        super().__init__(str(action))
        self.action = action


class Holder(Protocol):
    """Whatever holds on to a transport's channels."""

    def forget(self) -> None:
        """Drops them."""


class Alarm:
    """What the ranks tell each other when something goes wrong; one for a whole world.

    Args:
        transport: of the world; it spreads the failure.

    Attributes:
        holders: asked to forget the transport's channels when they are to be closed.
    """

    def __init__(self, transport: Transport) -> None:
        self.holders: WeakSet[Holder] = WeakSet()
        self._transport = transport
        self._dead: Failure | None = None

    @contextmanager
    def raised_everywhere(self) -> Iterator[None]:
        """What all ranks do together: an error in it, on any rank, is raised on every rank.

        Where it happened, pipeflow's own errors and an interruption pass as they are, with every other error as
        the cause of a PipelineError; all other ranks raise that PipelineError. After one, the next use starts
        afresh; but when a rank died there is no next one.
        """
        if self._dead is None:
            self._dead = self._start_afresh()
        if self._dead is not None:
            raise PipelineError(self._dead)
        try:
            yield
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, ActionError) else error
            mine = self._locate(error)
            _forget_frames(error)
            for holder in self.holders:
                holder.forget()
            first = self._transport.report(mine)
            if first.died is not None:
                self._dead = first
            if isinstance(cause, PipeflowError) or not isinstance(cause, Exception):
                raise (cause or error) from None
            raise PipelineError(first) from (None if isinstance(error, LinkError) else cause)

    def _start_afresh(self) -> Failure | None:
        """Opens the channels again after a failure; not all ranks may come to that."""
        try:
            self._transport.reopen()
        except RuntimeError as error:
            rank, seconds = self._transport.rank, self._transport.timeout
            reason = f"not every rank came to try again within {seconds:g} s ({error}); restart the job"
            return Failure(rank, reason)
        return None

    def _locate(self, error: BaseException) -> Failure:
        rank = self._transport.rank
        match error:
            case LinkError(timed_out=True):
                reason = f"gave up after {self._transport.timeout:g} s {error.doing} (rank {error.peer})"
                return Failure(rank, reason)
            case LinkError():
                reason = f"its connection closed while rank {rank} was {error.doing}; restart the job"
                return Failure(error.peer, reason, died=error.peer)
            case ActionError():
                action, cause = error.action, error.__cause__
                assert cause is not None
                where = (str(action), action.stage, action.microbatch)
                return Failure(rank, _reason(cause), *where, trace=_trace(cause))
            case _:
                return Failure(rank, _reason(error), trace=_trace(error))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _trace(error: BaseException) -> str:
    """The origin's traceback, for those who cannot see it; what pipeflow says itself needs none."""
    return "" if isinstance(error, PipeflowError) else "".join(traceback.format_exception(error))


_OURS = ("pipeflow.parallel", "pipeflow.runtime", "pipeflow.tensor", "pipeflow.training")


def _forget_frames(error: BaseException | None) -> None:
    """Empties the engine's own frames along the chain of errors: they hold transfers under way, and those keep
    channels open. The user's frames stay as they are, for a debugger.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith(_OURS):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__cause__ or error.__context__
