"""How fast training is: samples, tokens and operations per second, and the times of its phases."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import perf_counter

import torch

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.planning.device import DEVICES, Device
from pipeflow.training.engine import Step
from pipeflow.training.timer import MultiTimer
from pipeflow.training.trainer import Hook, Trainer

_SLOWER = {"laptop", "ti", "super", "d", "mig", "max"}  # names of other devices contain these words


def device_called(name: str) -> Device | None:
    """The device that torch calls `name`; None if unknown."""
    words = set(name.lower().replace("-", " ").split())
    known = {model: set(model.split("-")) for model in DEVICES}
    fitting = [model for model, parts in known.items() if {part for part in parts if not part.endswith("gb")} <= words]
    if not fitting or words & _SLOWER:
        return None
    return DEVICES[max(fitting, key=lambda model: len(known[model] & words))]


def peak_of(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Peak FLOP/s of matrix products in `dtype` on the device that torch calls `name`; None if unknown.

    >>> peak_of("NVIDIA A100-SXM4-80GB", torch.bfloat16, tf32=False)
    312000000000000.0
    """
    if (device := device_called(name)) is None:
        return None
    flops = device.flops
    if dtype is torch.float32:
        return flops["tf32"] if tf32 and "tf32" in flops else flops["float32"]
    return flops.get({torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, ""))


def peak_flops(model: Pipeline) -> float | None:
    """Peak FLOP/s of this rank's device, in the precision of its stages; None if unknown."""
    if model.context.device.type != "cuda":
        return None
    parameter = next(model.parameters(), None)
    dtype = model.autocast or (torch.float32 if parameter is None else parameter.dtype)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_of(torch.cuda.get_device_name(model.context.device), dtype, tf32=tf32)


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


class TimingHook(Hook):
    """Reports times in seconds. Metrics of training: "epoch seconds", without the evaluation, and "step seconds", the
    mean per step. Metric of the evaluation: "evaluation seconds".

    Attributes:
        timers: this rank's timers "epoch" and "evaluation"; their histories have one entry per epoch or evaluation.
    """

    priority = 15

    def __init__(self) -> None:
        self.timers = MultiTimer()
        self._steps = 0

    def before_epoch(self, trainer: Trainer) -> None:
        self._steps = 0
        self.timers.start("epoch")

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self._steps += 1

    def after_training(self, trainer: Trainer) -> None:
        seconds = self.timers.stop("epoch", keep_in_history=True) or 0.0
        trainer.metrics["train"]["epoch seconds"] = seconds
        trainer.metrics["train"]["step seconds"] = seconds / max(1, self._steps)

    def before_evaluation(self, trainer: Trainer) -> None:
        self.timers.start("evaluation")

    def after_evaluation(self, trainer: Trainer) -> None:
        trainer.metrics["test"]["evaluation seconds"] = self.timers.stop("evaluation", keep_in_history=True) or 0.0
