"""Timers: measure the time of a piece of a program. Must not contain: the timeline of a step, which
`execute_pipeline(..., trace=True)` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.device import synchronize


class Timer:
    """A stopwatch, in seconds. Starting and stopping wait until this process's GPU has finished its work.

    Attributes:
        elapsed: the last measured time, in seconds; 0 before the first.
        history: the measured times that were kept, in seconds.
    """

    def __init__(self) -> None:
        self.history: list[float] = []
        self.elapsed = 0.0
        self._begun: float | None = None

    def start(self) -> None:
        """Starts the timer, or starts it again."""
        self._begun = _now()

    def stop(self, keep_in_history: bool = False) -> float:
        """Returns the seconds since `start`; `keep_in_history=True` adds them to `history`. Raises UsageError if the
        timer is not running.
        """
        if self._begun is None:
            raise UsageError("this timer is not running: call start() before stop()")
        self.elapsed, self._begun = _now() - self._begun, None
        if keep_in_history:
            self.history.append(self.elapsed)
        return self.elapsed

    def get_elapsed_time(self) -> float:
        """Returns `elapsed`, the seconds of the last interval."""
        return self.elapsed

    def get_history_sum(self) -> float:
        """Returns the sum of `history`, in seconds."""
        return sum(self.history)

    def get_history_mean(self) -> float:
        """Returns the mean of `history`; 0 if it is empty."""
        return self.get_history_sum() / max(1, len(self.history))

    def reset(self) -> None:
        """Stops the timer and clears its times."""
        self.history.clear()
        self.elapsed, self._begun = 0.0, None


class MultiTimer:
    """Timers by name. A timer is created when it is first started.

    Args:
        on: False measures nothing.
    """

    def __init__(self, on: bool = True) -> None:
        self.is_on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Starts the timer `name`, unless timers are off."""
        if self.is_on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Returns the seconds since the timer's start, None if switched off; `keep_in_history=True` keeps them. Raises
        UsageError if the timer is not running.
        """
        return self.get_timer(name).stop(keep_in_history) if self.is_on else None

    def get_timer(self, name: str) -> Timer:
        """Returns the timer `name`. Raises UsageError if it was never started."""
        if name not in self._timers:
            there = ", ".join(self._timers) or "none"
            raise UsageError(f"there is no timer {name!r}: start it first (existing timers: {there})")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Resets the timer `name`, by default all timers. Raises UsageError as `get_timer` does."""
        for each in self._timers.values() if name is None else [self.get_timer(name)]:
            each.reset()

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())


def _now() -> float:
    context = context_if_launched()
    if context is not None:
        synchronize(context.device)
    return perf_counter()
