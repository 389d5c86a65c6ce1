"""The optimizer's step in the schedule: do steps follow each other after the span, as zero-bubble papers promise?

Stages sleep, in forwards and in both halves of backwards, on 4 ranks that are processes; sleeping needs no cores. Each
contender takes several steps in a row. A step's time is that from the end of one step to the end of the next on one
rank, so that the first step, in which the pipeline fills, does not count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from benchmarks.measure import Times, paired
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES = 4, 8
SECONDS = 0.010  # of a forward, and of each half of a backward, of a rank's whole share of the model
STEPS, FIRST = 10, 2  # steps in a row, and those of them that do not count
SCHEDULES = ("zb-h2", "zb-v")
AFTER, WITHIN = "after the schedule", "in the schedule"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    results = run_ranks("optimizer_step:measure", RANKS, {"rounds": rounds}, deadline=120 + 30 * rounds)
    times = {
        label: [statistics.fmean(each) for each in zip(*(of[label] for of in results), strict=True)]
        for label in results[0]
    }
    milliseconds = round(1e3 * SECONDS)
    title = (
        f"optimizer_step: {RANKS} ranks, {MICROBATCHES} microbatches, F = I = W = {milliseconds} ms, {rounds} rounds"
    )
    columns = ["the optimizer's step", "median ms", "planned ms", "x after", "promised"]
    report = Report("optimizer_step", title, columns, data={"seconds": times})
    for name in SCHEDULES:
        makespan, span = planned(name)
        for use, plan in ((AFTER, makespan), (WITHIN, span)):
            label = f"{name}: {use}"
            median, ratio = statistics.median(times[label]), paired(times, label, f"{name}: {AFTER}")
            report.rows.append(
                [label, f"{1e3 * median:.1f}", f"{1e3 * plan:.1f}", f"{ratio:.3f}", f"{plan / makespan:.3f}"]
            )
    report.notes.append("target: x after within 3 % of the promise, the span over the makespan")
    report.notes.append("ratios are medians over rounds of two times of the same round")
    return report


def planned(name: str) -> tuple[float, float]:
    """The makespan and the span of a schedule."""
    import pipeflow

    schedule = pipeflow.make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    timeline = pipeflow.simulate(schedule, pipeflow.CostModel.even(schedule.placement, SECONDS, SECONDS, SECONDS))
    return timeline.makespan, timeline.span


def measure(rounds: int) -> Times:
    """On every rank: the times of a step, one per round."""
    import torch

    steps = {f"{name}: {use}": _stepping(name, within=use is WITHIN) for name in SCHEDULES for use in (AFTER, WITHIN)}
    times: Times = {label: [] for label in steps}
    for _ in range(rounds):
        for label, take in steps.items():
            torch.distributed.barrier()
            times[label].append(take())
    return times


def _stepping(name: str, *, within: bool) -> Callable[[], float]:
    """A function that takes some steps and returns the time of one."""
    import torch
    from torch import nn

    import pipeflow
    from benchmarks.sleeping_halves import SleepingHalves

    schedule = pipeflow.make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    placement = schedule.placement
    own = placement.stages_of(int(os.environ["RANK"]))
    chunks = nn.ModuleList(SleepingHalves(16, SECONDS / placement.chunks_per_rank) for _ in own)
    schedule = pipeflow.with_optimizer_step(schedule) if within else schedule
    model = pipeflow.Pipeline(chunks, schedule, criterion=nn.functional.mse_loss, tensor_shape=(1, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.ones(MICROBATCHES, 16), torch.ones(MICROBATCHES, 16))
    pipelined = pipeflow.PipelinedOptimizer(model, optimizer, clip_grad_norm=1e6) if within else None

    def step() -> None:
        pipeflow.execute_pipeline(iter([batch]), model)
        if pipelined is None:
            pipeflow.clip_grad_norm_(model, 1e6)
            optimizer.step()
            optimizer.zero_grad()

    def steps() -> float:
        ends = []
        for _ in range(STEPS):
            step()
            ends.append(time.monotonic())
        if pipelined is not None:
            pipelined.confirm()
            assert pipelined.undone == 0
        return (ends[-1] - ends[FIRST - 1]) / (STEPS - FIRST)

    return steps
