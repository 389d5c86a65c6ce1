"""Throughput: samples, tokens and operations per second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import perf_counter

from pipeflow.core.errors import UsageError
from pipeflow.training.engine import Step
from pipeflow.training.hook import Hook
from pipeflow.training.peaks import peak_flops
from pipeflow.training.trainer import Trainer


class ThroughputHook(Hook):
    """Shows how fast training is: "samples/s"; "tokens/s" and "TFLOP/s" where their number per sample is given. All of
    them are those of the whole job. Where the peak of the device is known, "MFU" is the part of it that was used (model
    FLOPs utilization, arXiv 2204.02311, appendix B).

    After a step they are the means of the last `window` steps, after an epoch those of all its steps. The time of a
    step includes that of loading its data, not that of hooks.

    Args:
        tokens_per_sample: such as the length of a sequence.
        flops_per_sample: floating-point operations of a sample's forward and backward, on all its ranks, without
            what is computed again; `GPT.flops_per_sample` counts them.
        peak: FLOP/s of one device. By default that of the GPU's model in the precision of the weights, or of autocast.
        ignored_steps: so many steps at the start of training are not counted.
        window: how many steps a value is the mean of.
        clock: gives the time in seconds.

    Raises UsageError for numbers that cannot work.
    """

    priority = 15

    def __init__(
        self,
        *,
        tokens_per_sample: float = 0,
        flops_per_sample: float = 0,
        peak: float | None = None,
        ignored_steps: int = 1,
        window: int = 20,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        for name, number in (("tokens_per_sample", tokens_per_sample), ("flops_per_sample", flops_per_sample)):
            if not (math.isfinite(number) and number >= 0):
                raise UsageError(f"{name} must be positive, or 0 where it is not known, got {number}")
        if peak is not None and not peak > 0:
            raise UsageError(f"peak must be positive, got {peak}: the operations per second of one device")
        if ignored_steps < 0 or window < 1:
            raise UsageError(
                f"ignored_steps must be at least 0 and window at least 1, got {ignored_steps} and {window}"
            )
        self.tokens_per_sample = tokens_per_sample
        self.flops_per_sample = flops_per_sample
        self.peak = peak
        self.ignored_steps = ignored_steps
        self.clock = clock
        self._window: deque[tuple[int, float]] = deque(maxlen=window)
        self._start, self._seen, self._samples, self._seconds = 0.0, 0, 0, 0.0

    def before_fit(self, trainer: Trainer) -> None:
        self._seen = 0
        self._window.clear()
        if self.peak is None:
            self.peak = peak_flops(trainer.engine.model)

    def before_epoch(self, trainer: Trainer) -> None:
        self._samples, self._seconds = 0, 0.0

    def before_step(self, trainer: Trainer) -> None:
        self._start = self.clock()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        seconds = self.clock() - self._start
        self._seen += 1
        if self._seen <= self.ignored_steps:
            return
        self._window.append((step.samples, seconds))
        self._samples, self._seconds = self._samples + step.samples, self._seconds + seconds
        samples, times = zip(*self._window, strict=True)
        trainer.step_metrics |= self._rates(sum(samples), sum(times), trainer)

    def after_training(self, trainer: Trainer) -> None:
        if self._samples:
            trainer.metrics["train"] |= self._rates(self._samples, self._seconds, trainer)

    def _rates(self, samples: int, seconds: float, trainer: Trainer) -> dict[str, float]:
        speed = samples / seconds if seconds else math.inf
        rates = {"samples/s": speed}
        if self.tokens_per_sample:
            rates["tokens/s"] = speed * self.tokens_per_sample
        if self.flops_per_sample:
            rates["TFLOP/s"] = speed * self.flops_per_sample / 1e12
            if self.peak is not None:
                rates["MFU"] = speed * self.flops_per_sample / (self.peak * trainer.engine.model.context.world_size)
        return rates
