"""Stages that compute: 4 transformer blocks on 2 ranks with a thread each, 1F1B and interleaved 1F1B."""

from __future__ import annotations

import os
import statistics
from typing import Any

from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES, BLOCKS = 2, 8, 4
WIDTH, HEADS, LENGTH, SAMPLES = 192, 4, 128, 2  # samples of a microbatch
SCHEDULES = {"1f1b": 1, "interleaved-1f1b": 2}


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 11
    results = run_ranks("compute:measure", RANKS, {"rounds": rounds}, deadline=120 + 6 * rounds)
    times = step_times([each["times"] for each in results])
    title = f"compute: {RANKS} ranks, {MICROBATCHES} microbatches, {BLOCKS} blocks of width {WIDTH}, {rounds} rounds"
    report = Report("compute", title, ["", "median ms", "x by hand", "x torch"], data={"seconds": times})
    for label in times:
        name = label.split(":")[0]
        against = [f"{paired(times, label, f'{name}: {other}'):.3f}" for other in ("by hand", "torch")]
        report.rows.append([label, milliseconds(times[label]), *against])
    report.notes.append("ratios are medians over rounds of two times of the same round")
    return report


def milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: checks every contender's gradients, then takes the times."""
    import torch

    from benchmarks.contenders import all_of
    from benchmarks.measure import alternate

    task = make_task(MICROBATCHES)
    rank = int(os.environ["RANK"])
    times: Times = {}
    for name, chunks in SCHEDULES.items():
        contenders = all_of(task, rank, name, chunks, unknown_shape=True)
        times |= alternate({f"{name}: {label}": each for label, each in contenders.items()}, rounds)
        torch.distributed.barrier()
    return {"times": times}


def make_task(microbatches: int, *, width: int = WIDTH, length: int = LENGTH, samples: int = SAMPLES) -> Any:
    import torch
    from torch.nn import functional

    from benchmarks.models import Block
    from benchmarks.task import Task

    def make_stages(number: int) -> list[torch.nn.Module]:
        torch.manual_seed(1)
        blocks = [Block(width, HEADS) for _ in range(BLOCKS)]
        size = BLOCKS // number
        return [torch.nn.Sequential(*blocks[first : first + size]) for first in range(0, BLOCKS, size)]

    torch.manual_seed(0)
    inputs, labels = torch.randn(2, samples * microbatches, length, width)
    return Task(RANKS, microbatches, make_stages, functional.mse_loss, inputs=inputs, labels=labels)
