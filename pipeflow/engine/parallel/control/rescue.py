"""Rescue: frees a rank whose call goes on after a failure, because it waits for what closed channels do not end; and
runs calls that may block in C++ on a thread that can be abandoned.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from pipeflow.core.errors import Failure, error_of

T = TypeVar("T")


def aside(function: Callable[[], T], name: str) -> Future[T]:
    """Calls `function` on a new thread called `name` and returns a future of its result or exception.

    A caller that no longer needs the result drops the future. The thread is a daemon, so it does not keep the process
    alive.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


# A stage may compute a collective that pipeflow did not start: of fully_shard, of tensor or expert layers, or of its
# own. If a rank of it is dead or stopped, it never ends. A rank that is told of such a rank and stays in its call for a
# short time closes torch's process groups. If that does not help, as with communication outside of torch, the process
# ends. An error that another rank raised is no reason to hurry: that rank lives, and the call may still come to its
# end.

LONGEST = 2.0  # seconds within which a rank that is told of a failure comes out of its call, unless it is stuck
_IDLE = 0.1  # share of its time in which a process that waits computes at most


class Rescue:
    """Looks, while a failure is known, whether this rank still is in its call.

    Args:
        rank: this rank.
        soon: seconds to wait before each measure, if another rank is dead or stopped.

    Attributes:
        close: function that closes torch's process groups, so that their waits raise an error.
        end: function that ends the process after it has written a text.
    """

    def __init__(self, rank: int, soon: float) -> None:
        self.close: Callable[[], None] = lambda: None
        self.end: Callable[[str], None] = end_process
        self._rank = rank
        self._soon = soon
        self._failure: Failure | None = None  # of which this rank was told in the call that it is in
        self._is_closed = False
        self._patience = 0.0
        self._since = self._computed = 0.0  # the last measure: by the clock, and by the processors' time

    def begin(self, failure: Failure, patience: float) -> None:
        """Begins to look. A rank that computes itself has `patience`, in seconds, to come out of its call."""
        if self._failure is None:
            self._failure, self._is_closed, self._patience = failure, False, patience
            self._since, self._computed = time.monotonic(), time.process_time()

    def over(self) -> None:
        """The call has ended, or raises."""
        self._failure = None

    def look(self) -> None:
        """Call regularly, on another thread than the call's."""
        failure, waited = self._failure, time.monotonic() - self._since
        if failure is None:
            return
        hurries = failure.number is None and failure.rank != self._rank
        if not self._is_closed:
            if waited > (self._soon if hurries else self._patience):
                self._is_closed = True
                self._since, self._computed = time.monotonic(), time.process_time()
                self.close()
        elif waited > self._patience or (hurries and waited > self._soon and self._is_idle(waited)):
            error = error_of(failure)
            self.end(
                f"{type(error).__name__}: {error}\nRank {self._rank} waits in a call that nothing ends (its stack is "
                "above), so its process ends"
            )

    def _is_idle(self, seconds: float) -> bool:
        return time.process_time() - self._computed < _IDLE * seconds


def end_process(text: str) -> None:
    """Ends the process, although a thread waits in C++: writes all stacks and `text` to stderr, then exits with 1."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    os._exit(1)
