"""ThroughputHook: samples, tokens and operations per second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import perf_counter

from pipeflow.core.errors import UsageError
from pipeflow.training.hooks.peaks import peak_flops
from pipeflow.training.loop.engine import Step
from pipeflow.training.loop.trainer import Hook, Trainer


class ThroughputHook(Hook):
    """Reports the speed of the whole job as metrics: "samples/s", and "tokens/s" and "TFLOP/s" if their number per
    sample is given. If the peak of the device is known too, "MFU" is the fraction of it that was used (model FLOPs
    utilization, arXiv 2204.02311, appendix B).

    Metrics of a step are means over the last `window` steps, metrics of an epoch means over all its steps. The time of
    a step includes loading its data, but not hooks.

    Args:
        tokens_per_sample: number of tokens in a sample, such as the sequence length; 0 if unknown.
        flops_per_sample: floating-point operations of a sample's forward and backward on all ranks of a replica,
            without recomputation; 0 if unknown. `GPT.flops_per_sample` counts them.
        peak: FLOP/s of one device; by default known for some GPUs, for the dtype of the weights or of autocast.
        ignored_steps: number of steps at the start of training that are not counted.
        window: number of steps that a step's metrics are averaged over.
        clock: function that returns the time in seconds.

    Raises UsageError for numbers out of range.
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
                raise UsageError(f"{name} must be positive, or 0 if it is not known, got {number}")
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
