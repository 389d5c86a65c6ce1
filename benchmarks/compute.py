"""Stages that compute: 4 transformer blocks on 2 ranks with a thread each, 1F1B and interleaved 1F1B.

Also what a plan is worth: costs measured in one traced step, simulated, against the time of an untraced step.
"""

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
    planned: Times = results[0]["planned"]
    title = f"compute: {RANKS} ranks, {MICROBATCHES} microbatches, {BLOCKS} blocks of width {WIDTH}, {rounds} rounds"
    report = Report("compute", title, ["", "median ms", "x by hand", "x torch", "planned ms", "planned / measured"])
    report.data = {"seconds": times, "planned seconds": planned}
    for label in times:
        name = label.split(":")[0]
        against = [f"{paired(times, label, f'{name}: {other}'):.3f}" for other in ("by hand", "torch")]
        plan = ["", ""]
        if label == f"{name}: pipeflow":
            together = {"planned": planned[name], "measured": times[label]}
            plan = [_milliseconds(planned[name]), f"{paired(together, 'planned', 'measured'):.3f}"]
        report.rows.append([label, _milliseconds(times[label]), *against, *plan])
    report.notes.append("target: planned / measured within 0.9 and 1.1")
    report.notes.append("ratios are medians over rounds of two times of the same round; planned: from the traced step")
    return report


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: checks every contender's gradients, then takes the times and makes the plans."""
    import torch

    from benchmarks.contenders import all_of
    from benchmarks.measure import alternate

    task = make_task()
    rank = int(os.environ["RANK"])
    times: Times = {}
    planned: Times = {}
    for name, chunks in SCHEDULES.items():
        contenders = all_of(task, rank, name, chunks, unknown_shape=True)
        plans = _Plans(task, rank, name, chunks)
        contenders[plans.contender.name] = plans.contender
        times |= alternate({f"{name}: {label}": each for label, each in contenders.items()}, rounds)
        planned[name] = plans.makespans[-rounds:]
        torch.distributed.barrier()
    return {"times": times, "planned": planned}


class _Plans:
    """pipeflow with every step traced; from each step's costs, what the simulator says it should take."""

    def __init__(self, task: Any, rank: int, name: str, chunks: int) -> None:
        from benchmarks import pipeflow_side
        from benchmarks.task import Contender

        self.batch = (task.inputs, task.labels)
        self.schedule = pipeflow_side.schedule_of(task, name, chunks)
        self.model = pipeflow_side.pipeline(task, rank, name, chunks=chunks)
        self.timelines: list[Any] = []
        self.contender = Contender("pipeflow, traced", self.step, [self.model])

    def step(self) -> None:
        import pipeflow

        self.timelines.append(pipeflow.execute_pipeline(iter([self.batch]), self.model, trace=True).timeline)

    @property
    def makespans(self) -> list[float]:
        import pipeflow

        costs = [pipeflow.CostModel.measured(timeline) for timeline in self.timelines]
        return [pipeflow.simulate(self.schedule, cost).makespan for cost in costs]


def make_task() -> Any:
    import torch
    from torch.nn import functional

    from benchmarks.models import Block
    from benchmarks.task import Task

    def make_stages(number: int) -> list[torch.nn.Module]:
        torch.manual_seed(1)
        blocks = [Block(WIDTH, HEADS) for _ in range(BLOCKS)]
        size = BLOCKS // number
        return [torch.nn.Sequential(*blocks[first : first + size]) for first in range(0, BLOCKS, size)]

    torch.manual_seed(0)
    inputs, labels = torch.randn(2, SAMPLES * MICROBATCHES, LENGTH, WIDTH)
    return Task(RANKS, MICROBATCHES, make_stages, functional.mse_loss, inputs=inputs, labels=labels)
