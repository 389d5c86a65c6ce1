"""A step of Lamb beside a step of torch's AdamW, as its plain loop and by its foreach kernels: the same weights and
gradients, in turn, round after round, in one process. Lamb has two norms more to compute per weight.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.measure import Times, paired
from benchmarks.report import Report
from pipeflow.optim import Lamb

Shape = tuple[int, ...]
MODELS: dict[str, list[Shape]] = {
    "64 weights of 256 x 256": [(256, 256)] * 64,
    "4 weights of 2048 x 2048": [(2048, 2048)] * 4,
    "256 biases of 256": [(256,)] * 256,
}
DECAY = 0.01
CONTENDERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW, its loop": lambda weights: AdamW(weights, weight_decay=DECAY, foreach=False),
    "AdamW, foreach": lambda weights: AdamW(weights, weight_decay=DECAY, foreach=True),
    "Lamb": lambda weights: Lamb(weights, weight_decay=DECAY),
    "Lamb, bias_correction": lambda weights: Lamb(weights, weight_decay=DECAY, bias_correction=True),
}
LOOP = next(iter(CONTENDERS))


def run(rounds: int | None = None) -> Report:
    """One process, one thread, float32."""
    torch.set_num_threads(1)
    columns = ["", *(f"{name}, ms" for name in MODELS), *("of the loop" for _ in MODELS)]
    report = Report("optimizers", "optimizers: one step of AdamW and of Lamb, in turn", columns)
    measured = {name: measure(shapes, rounds or 100) for name, shapes in MODELS.items()}
    for contender in CONTENDERS:
        times = [each[contender] for each in measured.values()]
        own = [f"{1e3 * statistics.median(each):.2f} ({1e3 * min(each):.2f})" for each in times]
        ratios = [f"{paired(each, contender, LOOP):.2f}" for each in measured.values()]
        report.rows.append([contender, *own, *ratios])
    report.notes.append("the median of the steps, in brackets the fastest; of AdamW's loop in the same round")
    report.data = {"seconds": measured}
    return report


def measure(shapes: list[Shape], rounds: int) -> Times:
    """The time in seconds of each contender's step, one per round; each round begins with another contender."""
    steppers = {name: prepared(make, shapes) for name, make in CONTENDERS.items()}
    times: Times = {name: [] for name in steppers}
    names = list(steppers)
    for number in range(-3, rounds):
        shift = number % len(names)
        gc.collect()
        for name in names[shift:] + names[:shift]:
            begin = time.perf_counter()
            steppers[name].step()
            if number >= 0:
                times[name].append(time.perf_counter() - begin)
    return times


def prepared(make: Callable[[list[nn.Parameter]], Optimizer], shapes: list[Shape]) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return make(weights)
