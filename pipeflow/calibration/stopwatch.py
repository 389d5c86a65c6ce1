"""Stopwatch: how long something takes when all ranks do it at once. Must not contain: what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean, median

import torch

from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather

Work = Callable[[], object]
MOST_CALLS = 20_000  # in one round
MOST_LAUNCHES = 200  # fewer than the queue of a device holds, so that the host never waits for it


class Stopwatch:
    """Measures work that every rank does at the same time, as in training: ranks that share cores, memory or links slow
    each other down. Every rank must measure the same things in the same order.

    Args:
        context: this rank's place; work is on its device.
        rounds: of each measurement; the median counts.
        clock: seconds since any moment.
    """

    def __init__(self, context: Context, *, rounds: int = 5, clock: Callable[[], float] = time.perf_counter) -> None:
        self.context = context
        self._rounds = rounds
        self._clock = clock

    def seconds(self, work: Work, budget: float) -> float:
        """Seconds of one call of `work`, the same number on every rank: the mean over the ranks of each one's median.
        Calls are repeated for about `budget` seconds. Raises LinkError if a rank is lost.
        """
        return self._median(work, budget, MOST_CALLS, is_launch=False)

    def launch_seconds(self, work: Work, budget: float) -> float:
        """As `seconds`, but only of the host, which does not wait for its device to compute."""
        return self._median(work, budget, MOST_LAUNCHES, is_launch=True)

    def _median(self, work: Work, budget: float, most: int, *, is_launch: bool) -> float:
        each = budget / (self._rounds + 1)

        def of(calls: int) -> float:
            return self._round(work, calls, is_launch=is_launch)

        def fitting(seconds: float, one: float) -> int:
            return most if one <= 0 else max(1, min(most, int(seconds / one)))

        of(1)  # allocates, loads and connects what later calls find
        few = fitting(each / 10, self._agreed(of(1)))
        calls = fitting(each, self._agreed(of(few)))  # a single call may have been interrupted
        return self._agreed(median(of(calls) for _ in range(self._rounds)))

    def _round(self, work: Work, calls: int, *, is_launch: bool) -> float:
        """Seconds per call. Ranks begin together; a round is long beside the slices of time that processes get."""
        self._synchronize()
        self._agreed(0.0)
        start = self._clock()
        for _ in range(calls):
            work()
        if not is_launch:
            self._synchronize()
        return (self._clock() - start) / calls

    def _agreed(self, number: float) -> float:
        """The mean of every rank's number."""
        return fmean(row[0] for row in all_gather(self.context.world, [number]))

    def _synchronize(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
