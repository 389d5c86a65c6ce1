"""Stages that sleep: what is left of a schedule's promise when nothing but the runtime is in the way.

8 processes share the cores, since sleeping needs none. A rank's whole share of the model takes 5 ms forward and
10 ms backward; with 2 chunks a rank each takes half.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES, CHUNKS = 8, 32, 2
FORWARD, BACKWARD = 0.005, 0.010
SCHEDULES = {"1f1b": 1, "interleaved-1f1b": CHUNKS}


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    results = run_ranks("sleep:measure", RANKS, {"rounds": rounds}, deadline=120 + 6 * rounds)
    times = step_times(results)
    title = f"sleep: {RANKS} ranks, {MICROBATCHES} microbatches, F 5 ms and B 10 ms a rank, {rounds} rounds"
    report = Report("sleep", title, ["", "median ms", "x ideal", "x by hand", "x torch"], data={"seconds": times})
    for name, chunks in SCHEDULES.items():
        _add(report, name, times, _ideal(name, chunks))
    report.notes.append(
        "targets: pipeflow at most 1.02 x by hand; 1f1b below torch, interleaved-1f1b at most 0.92 x torch"
    )
    report.notes.append("ratios are medians over rounds of the two times of the same round")
    return report


def _ideal(name: str, chunks: int) -> float:
    """The makespan that the schedule promises for these times and free transfers."""
    import pipeflow

    options = {"chunks": chunks} if chunks > 1 else {}
    schedule = pipeflow.make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES, **options)
    cost = pipeflow.CostModel.even(
        schedule.placement, forward=FORWARD, backward_input=BACKWARD / 2, backward_weight=BACKWARD / 2
    )
    return pipeflow.simulate(schedule, cost).makespan


def _add(report: Report, name: str, times: Times, ideal: float) -> None:
    report.data.setdefault("ideal", {})[name] = ideal
    report.rows.append([f"{name}: ideal", f"{1e3 * ideal:.1f}", "1.000", "", ""])
    for label in (label for label in times if label.startswith(f"{name}: ")):
        median = statistics.median(times[label])
        against = [paired(times, label, f"{name}: {other}") for other in ("by hand", "torch")]
        report.rows.append(
            [label, f"{1e3 * median:.1f}", f"{median / ideal:.3f}", *(f"{each:.3f}" for each in against)]
        )


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: checks every contender's gradients without sleeping, then takes the times."""
    import torch
    from torch.nn import functional

    from benchmarks.contenders import all_of
    from benchmarks.measure import alternate
    from benchmarks.models import SleepStage
    from benchmarks.task import Task

    def make_stages(number: int) -> list[torch.nn.Module]:
        torch.manual_seed(1)
        return [SleepStage(16) for _ in range(number)]

    torch.manual_seed(0)
    batch = torch.randn(2, 2 * MICROBATCHES, 16)
    task = Task(RANKS, MICROBATCHES, make_stages, functional.mse_loss, inputs=batch[0], labels=batch[1])
    rank = int(os.environ["RANK"])
    contenders = {name: all_of(task, rank, name, chunks, two_groups=True) for name, chunks in SCHEDULES.items()}
    times: Times = {}
    for name, chunks in SCHEDULES.items():
        SleepStage.forward_seconds, SleepStage.backward_seconds = FORWARD / chunks, BACKWARD / chunks
        times |= alternate({f"{name}: {label}": each for label, each in contenders[name].items()}, rounds)
    return times
