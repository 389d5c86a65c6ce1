"""Progress: what a command is at, on standard error, once it has run for longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threading import Event

AFTER = 2.0  # seconds
_BEGAN: ContextVar[float | None] = ContextVar("began", default=None)


@contextmanager
def timed() -> Iterator[None]:
    """What runs within is a command: its seconds count from here."""
    token = _BEGAN.set(time.monotonic())
    try:
        yield
    finally:
        _BEGAN.reset(token)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Says `what` the command is doing, for as long as that is so, when the command has run for long: on a terminal in
    a line that goes away, with the seconds so far, else in one line. Outside of a command nothing is said.
    """
    began = _BEGAN.get()
    if began is None:
        yield
        return
    from threading import Event, Thread

    done = Event()
    thread = Thread(target=_say, args=(what, began, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say(what: str, began: float, done: Event) -> None:
    if done.wait(max(began + AFTER - time.monotonic(), 0.0)):
        return
    err = sys.stderr
    if not err.isatty():
        print(f"{what} ...", file=err, flush=True)
        return
    while not done.wait(0.5):
        print(f"\r{what} ... {time.monotonic() - began:.0f} s\x1b[K", end="", file=err, flush=True)
    print("\r\x1b[K", end="", file=err, flush=True)
