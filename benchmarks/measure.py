"""Timing: every contender in turn, round after round, every step started by all ranks at the same moment."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.task import Contender

Times = dict[str, list[float]]
Clock = Callable[[], float]


def alternate(
    contenders: dict[str, Contender], rounds: int, clock: Clock = time.monotonic, *, notice: float = 0.02
) -> Times:
    """Per contender, this rank's time in seconds from the common start to its own end, one per round.

    Every round runs every contender once, starting with another one each time, after one round of warm-up.
    `notice` is how many seconds before a step its ranks agree on its start.
    """
    times: Times = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()  # what exists already need not be searched for garbage before every step
    names = list(contenders)
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = _timed(contenders[name], clock, notice)
            if number >= 0:
                times[name].append(seconds)
    return times


def _timed(contender: Contender, clock: Clock, notice: float) -> float:
    contender.zero_grad()
    gc.collect()
    moment = _common_moment(notice)
    start = moment if clock is time.monotonic else clock()
    contender.step()
    return clock() - start


def _common_moment(notice: float) -> float:
    """Waits until a moment on which all ranks agree; the machine's clock is one for all of its processes."""
    moment = torch.tensor(time.monotonic() + notice, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    time.sleep(max(0.0, moment.item() - time.monotonic()))
    return moment.item()


def step_times(per_rank: Sequence[Times]) -> Times:
    """A step ends when its last rank does."""
    return {
        name: [max(ends) for ends in zip(*(times[name] for times in per_rank), strict=True)] for name in per_rank[0]
    }


def paired(times: Times, name: str, other: str) -> float:
    """The median over rounds of the ratio of `name` to `other` in the same round."""
    return statistics.median(mine / theirs for mine, theirs in zip(times[name], times[other], strict=True))
