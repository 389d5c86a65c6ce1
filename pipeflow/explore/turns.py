"""Turns: questions that somebody waits for go before those that take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

LONGEST = 2.0  # seconds


class Turns:
    """Lets threads go first. Threads of one process share the processor, so what runs beside a question delays it."""

    def __init__(self) -> None:
        self._first = 0
        self._changed = Condition()

    @contextmanager
    def first(self) -> Iterator[None]:
        """While this is open, whoever waits waits."""
        with self._changed:
            self._first += 1
        try:
            yield
        finally:
            with self._changed:
                self._first -= 1
                self._changed.notify_all()

    @property
    def free(self) -> bool:
        """Whether nobody goes first."""
        return not self._first

    def wait(self) -> None:
        """Returns when nobody goes first, or after some time, so that it is never left out."""
        with self._changed:
            self._changed.wait_for(lambda: self.free, LONGEST)


TURNS = Turns()
"""The turns of the questions of a page."""
