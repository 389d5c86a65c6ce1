"""Timers: how long a piece of a program takes, measured by hand. What must not live here: the spans of a step, which
`execute_pipeline(..., trace=True)` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import torch

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import context_if_launched


class Timer:
    """A stopwatch, in seconds. It waits for what this process has begun on its GPU, at each end.

    Attributes:
        elapsed: the last time that was stopped, 0 before.
        history: the times that were kept.
    """

    def __init__(self) -> None:
        self.history: list[float] = []
        self.elapsed = 0.0
        self._begun: float | None = None

    def start(self) -> None:
        """Starts, or starts anew."""
        self._begun = _now()

    def stop(self, keep_in_history: bool = False) -> float:
        """The time since `start`. Raises UsageError without one."""
        if self._begun is None:
            raise UsageError("this timer does not run: call start() before stop()")
        self.elapsed, self._begun = _now() - self._begun, None
        if keep_in_history:
            self.history.append(self.elapsed)
        return self.elapsed

    def get_elapsed_time(self) -> float:
        """`elapsed`."""
        return self.elapsed

    def get_history_sum(self) -> float:
        """All that was kept."""
        return sum(self.history)

    def get_history_mean(self) -> float:
        """The mean of what was kept, 0 when that is nothing."""
        return self.get_history_sum() / max(1, len(self.history))

    def reset(self) -> None:
        """Forgets all, and no longer runs."""
        self.history.clear()
        self.elapsed, self._begun = 0.0, None


class MultiTimer:
    """Timers by name, each made when it is first started; switched off (`on=False`) it measures nothing."""

    def __init__(self, on: bool = True) -> None:
        self.is_on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Starts the timer of that name."""
        if self.is_on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """The seconds since its start; None when switched off. Raises UsageError for one that does not run."""
        return self.get_timer(name).stop(keep_in_history) if self.is_on else None

    def get_timer(self, name: str) -> Timer:
        """Raises UsageError for a name that was never started."""
        if name not in self._timers:
            there = ", ".join(self._timers) or "none"
            raise UsageError(f"there is no timer {name!r}: start it first; there are {there}")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Resets the timer of that name, by default all. Raises UsageError as `get_timer` does."""
        for each in self._timers.values() if name is None else [self.get_timer(name)]:
            each.reset()

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())


def _now() -> float:
    context = context_if_launched()
    if context is not None and context.device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(context.device)
    return perf_counter()
