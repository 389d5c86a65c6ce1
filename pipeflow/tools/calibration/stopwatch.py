"""Stopwatch: the time of work that all ranks do at the same time. Must not contain: the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.device import synchronize
from pipeflow.engine.parallel.transport.agreement import all_gather

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
        [seconds] = self.phases([work], budget)
        return seconds

    def phases(self, works: Sequence[Work], budget: float) -> list[float]:
        """Like `seconds`, for each of `works`, which are called in turn."""
        return self._median(works, budget, MOST_CALLS, is_launch=False)

    def launch_seconds(self, work: Work, budget: float) -> float:
        """Like `seconds`, but counts only the time of the host, which does not wait for its device."""
        [seconds] = self.launch_phases([work], budget)
        return seconds

    def launch_phases(self, works: Sequence[Work], budget: float) -> list[float]:
        """Like `phases`, but counts only the time of the host."""
        return self._median(works, budget, MOST_LAUNCHES, is_launch=True)

    def _median(self, works: Sequence[Work], budget: float, most: int, *, is_launch: bool) -> list[float]:
        each = budget / (self._rounds + 1)

        def of(calls: int) -> list[float]:
            return self._round(works, calls, is_launch=is_launch)

        def fitting(seconds: float, one: float) -> int:
            return most if one <= 0 else max(1, min(most, int(seconds / one)))

        of(1)  # allocates, loads and connects what later calls find
        few = fitting(each / 10, sum(self._agreed(of(1))))
        calls = fitting(each, sum(self._agreed(of(few))))  # a single call may have been interrupted
        rounds = [of(calls) for _ in range(self._rounds)]
        return self._agreed([median(seconds) for seconds in zip(*rounds, strict=True)])

    def _round(self, works: Sequence[Work], calls: int, *, is_launch: bool) -> list[float]:
        """Seconds per call. Ranks begin together. A round is long compared with the time slices of processes."""
        synchronize(self.context.device)
        self._agreed([0.0])
        seconds = [0.0] * len(works)
        last = self._clock()
        for call in range(calls):
            for index, work in enumerate(works):
                work()
                if not is_launch and (len(works) > 1 or call == calls - 1):
                    synchronize(self.context.device)
                now = self._clock()
                seconds[index] += now - last
                last = now
        return [each / calls for each in seconds]

    def _agreed(self, numbers: list[float]) -> list[float]:
        """The mean of every rank's numbers."""
        return [fmean(column) for column in zip(*all_gather(self.context.world, numbers), strict=True)]
