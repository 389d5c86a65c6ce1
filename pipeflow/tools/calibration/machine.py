"""Machine: the device of a rank, its name, memory and precisions; and a stopwatch for work that all ranks do together.
Must not contain: the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from types import MappingProxyType

import torch

from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.device import synchronize
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.torch_private.tensors import has_bf16_units

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""By the names of precisions: the type of the operands of products."""


def device_name(device: torch.device, ranks: int) -> str:
    """The name of the device of one of a node's `ranks`. Processes on CPUs share the cores, so the name has their
    number.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads, cores = torch.get_num_threads(), _cores()
    return f"cpu, {_counted(ranks, 'process', 'es')} of {_counted(threads, 'thread')} on {_counted(cores, 'core')}"


def sharing(device: torch.device, ranks: int) -> float:
    """How many of a node's `ranks` share one processor. It is more than 1 if there are more threads than cores."""
    if device.type != "cpu":
        return 1.0
    return max(1.0, ranks * torch.get_num_threads() / _cores())


def runs_ahead(device: torch.device) -> bool:
    """Whether the host launches while the device computes, which a CPU cannot."""
    return device.type != "cpu"


def memory_bytes(device: torch.device, ranks: int) -> float:
    """Memory of one device, in bytes. On a machine without GPUs, each of its `ranks` has an equal part of it."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def precisions(device: torch.device) -> tuple[str, ...]:
    """The precisions that the device has units for; first the one that models are usually trained in."""
    if device.type == "cuda":
        generation = torch.cuda.get_device_capability(device)[0]
        return (*["bf16"] * (generation >= 8), *["fp16"] * (generation >= 7), *["tf32"] * (generation >= 8), "float32")
    return ("float32", *["bf16"] * (device.type == "cpu" and has_bf16_units()))


@contextmanager
def products_in(precision: str) -> Iterator[torch.dtype]:
    """Context manager that gives the type of operands whose products are computed in `precision`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield DTYPES[precision]
    finally:
        torch.set_float32_matmul_precision(before)


def _cores() -> int:
    """The number of cores that this process may use; all of them on systems that do not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _counted(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else ending}"


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

    def seconds(self, work: Work, budget: float, *, launch: bool = False) -> float:
        """Seconds of one call of `work`, the same number on every rank: the mean over the ranks of each one's median.
        Calls are repeated for about `budget` seconds. With `launch`, counts only the time of the host, which does not
        wait for its device. Raises LinkError if a rank is lost.
        """
        [seconds] = self.phases([work], budget, launch=launch)
        return seconds

    def phases(self, works: Sequence[Work], budget: float, *, launch: bool = False) -> list[float]:
        """Like `seconds`, for each of `works`, which are called in turn."""
        each, most = budget / (self._rounds + 1), MOST_LAUNCHES if launch else MOST_CALLS

        def of(calls: int) -> list[float]:
            return self._round(works, calls, launch=launch)

        def fitting(seconds: float, one: float) -> int:
            return most if one <= 0 else max(1, min(most, int(seconds / one)))

        of(1)  # allocates, loads and connects what later calls find
        few = fitting(each / 10, sum(self._agreed(of(1))))
        calls = fitting(each, sum(self._agreed(of(few))))  # a single call may have been interrupted
        rounds = [of(calls) for _ in range(self._rounds)]
        return self._agreed([median(seconds) for seconds in zip(*rounds, strict=True)])

    def _round(self, works: Sequence[Work], calls: int, *, launch: bool) -> list[float]:
        """Seconds per call. Ranks begin together. A round is long compared with the time slices of processes."""
        synchronize(self.context.device)
        self._agreed([0.0])
        seconds = [0.0] * len(works)
        last = self._clock()
        for call in range(calls):
            for index, work in enumerate(works):
                work()
                if not launch and (len(works) > 1 or call == calls - 1):
                    synchronize(self.context.device)
                now = self._clock()
                seconds[index] += now - last
                last = now
        return [each / calls for each in seconds]

    def _agreed(self, numbers: list[float]) -> list[float]:
        """The mean of every rank's numbers."""
        return [fmean(column) for column in zip(*all_gather(self.context.world, numbers), strict=True)]
