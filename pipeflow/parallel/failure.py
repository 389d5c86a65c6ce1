"""Failure: raises an error of one rank on every rank, and prepares the next step after it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol
from weakref import WeakSet

from pipeflow.core.action import Action
from pipeflow.core.errors import Failure, PipeflowError, PipelineError, UsageError, error_of
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.parallel.transport.work import LinkError

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

        `call`, as a string, describes this rank's call. It appears in the error if ranks make different calls.

        On the rank where the error happened, pipeflow's own errors and interruptions are raised unchanged; any other
        error becomes the cause of a PipelineError. All other ranks raise that PipelineError, which is a UsageError as
        well if the error was one. The next call then starts afresh, unless a rank died: then every further call raises
        the same error.
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
            mine = str(call) if first.number == self._number else ""  # not if it failed before this call
            raise error_of(first, mine) from (None if isinstance(error, LinkError) else cause)
        finally:
            transport.patience, transport.call = outside

    def expect_slow(self) -> None:
        """Makes other ranks wait ten times as long for this rank in the current call, because it compiles first."""
        self._transport.patience = self._transport.timeout * _SLOWER

    def _locate(self, error: BaseException) -> Failure:
        found = Failure(self._transport.rank, _reason(error), number=self._number, call=str(self._transport.call))
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
