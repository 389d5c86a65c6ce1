"""What a plan is worth: per schedule, costs measured in traced steps, simulated, against the time of untraced steps.
Both end when all ranks have agreed that the step is over.

The blocks are those of `compute`, on 2 ranks. Traced and untraced steps take turns.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.compute import RANKS, WIDTH, milliseconds
from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

MICROBATCHES = 8


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 61
    results = run_ranks("plans:measure", RANKS, {"rounds": rounds}, deadline=200 + 40 * rounds)
    measured, planned = step_times([each["times"] for each in results]), results[0]["planned"]
    title = f"plans: {RANKS} ranks, {MICROBATCHES} microbatches, blocks of width {WIDTH}, {rounds} rounds"
    report = Report("plans", title, ["", "planned ms", "measured ms", "planned / measured"])
    report.data = {"measured seconds": measured, "planned seconds": planned}
    for name, seconds in planned.items():
        ratio = paired({"planned": seconds, "measured": measured[name]}, "planned", "measured")
        report.rows.append([name, milliseconds(seconds), milliseconds(measured[name]), f"{ratio:.3f}"])
    report.notes.append("target: planned / measured within 0.95 and 1.05")
    return report


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: per schedule the times of its steps, and what its plan says, from each traced step's costs."""
    import torch

    from benchmarks import pipeflow_side
    from benchmarks.compute import make_task
    from benchmarks.measure import alternate
    from benchmarks.task import check
    from pipeflow.schedules import SCHEDULES

    task = make_task(MICROBATCHES)
    rank = int(os.environ["RANK"])
    times: Times = {}
    planned: Times = {}
    for name in SCHEDULES:
        contender = pipeflow_side.contender(task, rank, name)
        check(task, contender, rank, contender.runner.schedule.placement)
        traced = Traced(task, contender.runner)
        both = alternate({"untraced": contender, "traced": traced.contender}, rounds)
        times[name] = both["untraced"]
        planned[name] = traced.steps[-rounds:]
        torch.distributed.barrier()
    return {"times": times, "planned": planned}


class Traced:
    """A pipeline with every step traced; from each step's costs, what the simulator says it should take."""

    def __init__(self, task: Any, model: Any) -> None:
        from benchmarks.task import Contender

        self.batch = (task.inputs, task.labels)
        self.model = model
        self.timelines: list[Any] = []
        self.contender = Contender("pipeflow, traced", self.step, [model])

    def step(self) -> None:
        import pipeflow

        self.timelines.append(pipeflow.execute_pipeline(iter([self.batch]), self.model, trace=True).timeline)

    @property
    def steps(self) -> list[float]:
        import pipeflow
        from pipeflow.core.agreement_rounds import step_time
        from pipeflow.core.dataflow import Stream

        costs = [pipeflow.measured_costs(timeline) for timeline in self.timelines]
        schedule = self.model.schedule
        ran = schedule.with_reductions() if Stream.REDUCE in self.timelines[0].streams else schedule
        return [step_time(pipeflow.simulate(ran, cost), cost) for cost in costs]
