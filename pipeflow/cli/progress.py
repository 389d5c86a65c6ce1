"""Progress: what a command is doing, on standard error, once it has taken longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threading import Event

AFTER = 2.0  # seconds


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Context manager that reports `what` the command is doing if that takes long: on a terminal as a line that
    disappears at the end, with the seconds so far; otherwise as one line.
    """
    from threading import Event, Thread

    done = Event()
    thread = Thread(target=_say, args=(what, time.monotonic(), done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say(what: str, began: float, done: Event) -> None:
    if done.wait(AFTER):
        return
    err = sys.stderr
    if not err.isatty():
        print(f"{what} ...", file=err, flush=True)
        return
    while not done.wait(0.5):
        print(f"\r{what} ... {time.monotonic() - began:.0f} s\x1b[K", end="", file=err, flush=True)
    print("\r\x1b[K", end="", file=err, flush=True)
