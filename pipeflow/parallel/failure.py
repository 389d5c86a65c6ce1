"""Failure: how an error on one rank becomes the same error on every rank, and how the next step starts afresh."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from pipeflow.core.action import Action
from pipeflow.core.errors import Failure, PipeflowError, PipelineError
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.parallel.transport.work import LinkError

_SLOWER = 10.0  # times


class ActionError(Exception):
    """Carries an error, its cause, out of the action that it happened in."""

    def __init__(self, action: Action) -> None:
        super().__init__(str(action))
        self.action = action


class Holder(Protocol):
    """Whatever holds on to a transport's channels."""

    def forget(self) -> None:
        """Drops them: they are broken."""


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
        self._number = 0  # of the call that all ranks make together

    @contextmanager
    def raised_everywhere(self, call: object = "") -> Iterator[None]:
        """What all ranks do together: an error in it, on any rank, is raised on every rank. `call` says, as a string,
        what this rank was asked to do, for the error that tells that ranks were asked different things.

        Where it happened, pipeflow's own errors and an interruption pass as they are, with every other error as
        the cause of a PipelineError; all other ranks raise that PipelineError. After one, the next use starts
        afresh; but when a rank died there is no next one.
        """
        if self._dead is not None:
            raise PipelineError(self._dead)
        transport, outside = self._transport, (self._transport.patience, self._transport.call)
        transport.patience, transport.call = self._transport.timeout, call
        self._number += 1
        try:
            transport.reopen()
            transport.enter(self._number)
            yield
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, ActionError) else error
            first = transport.report(error if isinstance(error, LinkError) else self._locate(error))
            for holder in self.holders:
                holder.forget()
            if first.died is not None:
                self._dead = first
            if isinstance(cause, PipeflowError) or not isinstance(cause, Exception):
                raise (cause or error) from None
            raise PipelineError(first) from (None if isinstance(error, LinkError) else cause)
        finally:
            transport.patience, transport.call = outside

    def expect_slow(self) -> None:
        """Has the others wait ten times as long for this rank in the call that it makes: it compiles first."""
        self._transport.patience = self._transport.timeout * _SLOWER

    def _locate(self, error: BaseException) -> Failure:
        rank = self._transport.rank
        match error:
            case ActionError():
                action, cause = error.action, error.__cause__
                assert cause is not None
                where = (str(action), action.stage, action.microbatch)
                return Failure(rank, _reason(cause), *where, trace=_trace(cause), number=self._number)
            case _:
                return Failure(rank, _reason(error), trace=_trace(error), number=self._number)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _trace(error: BaseException) -> str:
    """The origin's traceback, for those who cannot see it; what pipeflow says itself needs none."""
    return "" if isinstance(error, PipeflowError) else "".join(traceback.format_exception(error))
