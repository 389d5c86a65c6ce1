"""Progress: what a command is doing, on standard error, once it has taken longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threading import Event

AFTER = 2.0  # seconds
EARLY = 0.02  # share of the work before which the time left is not estimated


@contextmanager
def doing(what: str, *, seconds: float | None = None) -> Iterator[Callable[[float], None]]:
    """Context manager that reports `what` the command is doing if that takes long: on a terminal as a line with a bar
    that disappears at the end, otherwise as one line of text. The bar shows the share that is done and the time left:
    of `seconds` if the work takes a known time, otherwise what the yielded function was last called with, from 0 to 1.
    """
    from threading import Event, Thread

    done, began = Event(), time.monotonic()
    reported = [0.0]

    def share() -> float:
        return reported[0] if seconds is None else min((time.monotonic() - began) / seconds, 1.0)

    thread = Thread(target=_say, args=(what, began, done, share), daemon=True)
    thread.start()
    try:
        yield lambda each: reported.__setitem__(0, each)
    finally:
        done.set()
        thread.join()


def _say(what: str, began: float, done: Event, share: Callable[[], float]) -> None:
    if done.wait(AFTER):
        return
    if not sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(30), TextColumn("{task.fields[times]}")
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=4, transient=True) as progress:
        task = progress.add_task(what, total=None, times="")
        while not done.wait(0.25):
            elapsed, part = time.monotonic() - began, share()
            left = f", about {elapsed / part - elapsed:.0f} s left" if part > EARLY else ""
            progress.update(task, total=1 if part else None, completed=part, times=f"{elapsed:.0f} s{left}")
