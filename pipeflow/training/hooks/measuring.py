"""Hooks that measure training (rates of learning, speed, times, memory and the bubble) and evaluations (metrics of the
outputs, over all replicas). They write metrics, the same on every rank, which other hooks show.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_at_least, require_positive
from pipeflow.core.timeline import Timeline
from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object, gather_rows
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.runtime.step import Output
from pipeflow.planning.device import DEVICES, Device
from pipeflow.training.engine import Step
from pipeflow.training.optim.rates import Scheduler
from pipeflow.training.timer import MultiTimer
from pipeflow.training.trainer import Hook, Trainer


class RateHook(Hook):
    """Reports the metric "learning rate", the rate of the first parameter group of rank 0's optimizer; also steps a
    scheduler.

    Args:
        scheduler: learning-rate scheduler to step. One that steps with the optimizer can also be passed to the Engine.
        by_epoch: True steps the scheduler after each epoch, False after each optimizer step that was not skipped.
    """

    priority = 10

    def __init__(self, scheduler: Scheduler | None = None, *, by_epoch: bool = True) -> None:
        self.scheduler = scheduler
        self.by_epoch = by_epoch
        self._differs = False  # whether ranks have other groups, as with rates that differ between layers

    def before_fit(self, trainer: Trainer) -> None:
        rates = [float(group["lr"]) for group in trainer.engine.optimizer.param_groups]
        everyones = all_gather_object(trainer.engine.model.context.world, rates)
        self._differs = any(each != everyones[0] for each in everyones)
        if self.scheduler is not None and self.scheduler not in trainer.schedulers:
            trainer.schedulers.append(self.scheduler)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        trainer.step_metrics["learning rate"] = self._rate(trainer)
        if self.scheduler is not None and not self.by_epoch and step.is_taken:
            self.scheduler.step()

    def after_training(self, trainer: Trainer) -> None:
        trainer.metrics["train"]["learning rate"] = self._rate(trainer)
        if self.scheduler is not None and self.by_epoch:
            self.scheduler.step()

    def _rate(self, trainer: Trainer) -> Any:
        """The rate on rank 0; all ranks call it together."""
        rate = trainer.engine.optimizer.param_groups[0]["lr"]
        return all_gather(trainer.engine.model.context.world, [float(rate)])[0][0] if self._differs else rate


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
        require_at_least(0, ignored_steps=ignored_steps)
        require_positive(window=window)
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


_GIB = 2**30
_STATM = Path("/proc/self/statm")


class MemoryHook(Hook):
    """Reports the metric "memory GiB", the memory of the rank that uses most. On an accelerator it is the peak that
    torch allocated since the epoch began, on CPUs the process's current resident memory. It is measured after each
    epoch and every `every`-th step.

    Args:
        every: number of steps between two measurements.

    Attributes:
        by_rank: GiB of each rank at the last measurement.

    Raises UsageError if `every` is less than 1.
    """

    priority = 15

    def __init__(self, every: int = 100) -> None:
        require_positive(every=every)
        self.every = every
        self.by_rank: list[float] = []

    def before_epoch(self, trainer: Trainer) -> None:
        device = trainer.engine.model.context.device
        if _is_accelerator(device):
            torch.accelerator.reset_peak_memory_stats(device)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if (trainer.step_in_epoch - 2) % self.every == 0:
            trainer.step_metrics["memory GiB"] = self._largest(trainer)

    def after_training(self, trainer: Trainer) -> None:
        trainer.metrics["train"]["memory GiB"] = self._largest(trainer)

    def _largest(self, trainer: Trainer) -> float:
        context = trainer.engine.model.context
        with context.alarm.raised_everywhere():
            rows = all_gather(context.world, [memory_of(context.device)])
        self.by_rank = [held / _GIB for [held] in rows]
        return max(self.by_rank)


def memory_of(device: torch.device) -> int:
    """Bytes in use: on an accelerator the peak that torch allocated; elsewhere the resident memory of this process, or
    its peak on systems that report only that.
    """
    if _is_accelerator(device):
        return int(torch.accelerator.max_memory_allocated(device))
    if _STATM.exists():
        return int(_STATM.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _is_accelerator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


class BubbleHook(Hook):
    """Reports the metric "bubble", the fraction of a step in which the busiest rank is idle. Also reports "planned
    bubble", the bubble if every action took the mean time of its kind. It traces the second step, then every `every`-th
    step; steps that another hook traces are reported too.

    Args:
        every: number of steps between two traced steps.

    Raises UsageError if `every` is less than 1.
    """

    priority = 15

    def __init__(self, every: int = 100) -> None:
        require_positive(every=every)
        self.every = every
        self._steps = 0

    def before_fit(self, trainer: Trainer) -> None:
        self._steps = 0

    def before_step(self, trainer: Trainer) -> None:
        if (self._steps - 1) % self.every == 0:  # the first step compiles
            trainer.trace_next_step()
        self._steps += 1

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.timeline is not None:
            trainer.step_metrics["bubble"] = step.timeline.makespan_bubble_ratio
            trainer.step_metrics["planned bubble"] = planned(step.timeline).makespan_bubble_ratio


def planned(timeline: Timeline) -> Timeline:
    """The timeline that simulation gives for the executed schedule, under the mean costs measured in `timeline`."""
    return simulate(executed_schedule(timeline), measured_costs(timeline))


class MetricHook(Hook):
    """Reports a metric of each evaluation.

    Args:
        name: its name in `trainer.metrics["test"]`.
        metric: a metric of torchmetrics, or an object with `update(outputs, labels)`, `compute()` and `reset()`.
            Metrics of torchmetrics are synchronized over the replicas; others are computed from one replica's data.

    Raises UsageError for an object that lacks one of these methods.
    """

    priority = 20
    needs_outputs = frozenset({"test"})

    def __init__(self, name: str, metric: Any) -> None:
        if missing := [method for method in ("update", "compute", "reset") if not hasattr(metric, method)]:
            raise UsageError(
                f"metric {name!r} is a {type(metric).__name__} and has no {missing[0]}(): see torchmetrics"
            )
        self.name = name
        self.metric = metric

    def before_evaluation(self, trainer: Trainer) -> None:
        self.metric.reset()
        if hasattr(self.metric, "dist_sync_fn"):  # torchmetrics'
            context = trainer.engine.model.context
            self.metric.to(context.device)
            self.metric.dist_sync_fn = lambda tensor, group=None: gather_rows(context.data, tensor)
            self.metric.distributed_available_fn = lambda: context.data.size > 1

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        if output.outputs is not None:
            self.metric.update(output.outputs, labels)

    def after_evaluation(self, trainer: Trainer) -> None:
        with trainer.engine.model.context.alarm.raised_everywhere():  # replicas wait for each other within
            value = self._value() if trainer.has_last_stage else math.nan
        trainer.metrics["test"][self.name] = trainer.told_by_last_stage(value)

    def _value(self) -> float:
        value = self.metric.compute()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"metric {self.name!r} must be one number, got {value!r}: give each number its own MetricHook, or "
                "choose how they are averaged"
            ) from None


class AccuracyHook(Hook):
    """Reports the metric "accuracy" of each evaluation: the fraction of correct answers.

    Args:
        count_right: `count_right(outputs, labels)` returns the number of correct answers in a batch. By default an
            answer is correct if its label has the largest score.
    """

    priority = 20
    needs_outputs = frozenset({"test"})

    def __init__(self, count_right: Callable[[Any, Any], Tensor | float] | None = None) -> None:
        self.count_right = _count_right if count_right is None else count_right
        self._right = self._samples = 0.0

    def before_evaluation(self, trainer: Trainer) -> None:
        self._right = self._samples = 0.0

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        self._samples += output.samples
        if output.outputs is not None:
            self._right += float(self.count_right(output.outputs, labels))

    def after_evaluation(self, trainer: Trainer) -> None:
        context = trainer.engine.model.context
        with context.alarm.raised_everywhere():
            rows = all_gather(context.world, [self._right])
        replicas = defaultdict[int, list[float]](list)
        for rank, [count] in zip(context.living, rows, strict=True):
            replicas[context.launched.place(rank).data].append(count)
        right = sum(map(max, replicas.values()))
        trainer.metrics["test"]["accuracy"] = right / self._samples if self._samples else math.nan


def _count_right(outputs: Any, labels: Any) -> Tensor | float:
    return float((outputs.argmax(dim=-1) == labels.to(outputs.device)).sum())
