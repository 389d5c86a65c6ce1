"""Recomputation under 1F1B: actions of the schedule beside torch's checkpoint around the same blocks.

The blocks are those of `compute`, two on each of 2 ranks. One checkpoint around both keeps what C keeps: the stage's
input. The schedule's own recomputations leave out a microbatch whose backward follows its forward at once; they stand
beside those of every microbatch, which do the work of torch's checkpoint.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.compute import RANKS, WIDTH, make_task
from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

if TYPE_CHECKING:
    import pipeflow

MICROBATCHES = 8
TORCH = "torch's checkpoint"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 21
    results = run_ranks("recompute:measure", RANKS, {"rounds": rounds}, deadline=120 + 20 * rounds)
    steps, busy = (step_times([each[clock] for each in results]) for clock in ("step", "cpu"))
    title = f"recompute: 1f1b, {RANKS} ranks, {MICROBATCHES} microbatches, blocks of width {WIDTH}, {rounds} rounds"
    columns = ["", "step ms", f"x {TORCH}", "CPU ms of the busiest rank", f"x {TORCH}"]
    report = Report("recompute", title, columns, data={"steps": steps, "cpu": busy})
    for name in steps:
        cells = [(f"{1e3 * statistics.median(of[name]):.1f}", f"{paired(of, name, TORCH):.3f}") for of in (steps, busy)]
        report.rows.append([name, *cells[0], *cells[1]])
    report.notes.append("target: C of every microbatch at most 1.02 x torch's checkpoint")
    report.notes.append("ratios are medians over rounds of two times of the same round; of the CPU, of one thread")
    return report


def measure(rounds: int) -> dict[str, Times]:
    """On every rank: checks every contender's gradients, then takes the times of steps, and of this rank's thread."""
    from benchmarks.measure import alternate
    from benchmarks.task import Contender, check

    task, rank = make_task(MICROBATCHES), int(os.environ["RANK"])
    stages = task.make_stages(RANKS)
    schedules = schedules_of()
    plain = schedules["nothing recomputed"]
    found = {name: contender(task, stages[rank], plain, schedule) for name, schedule in schedules.items()}
    found[TORCH] = contender(task, checkpointed([stages[rank]]), plain, plain)
    found[f"{TORCH} of each block"] = contender(task, checkpointed(stages[rank]), plain, plain)
    for name, (model, step) in found.items():
        check(task, Contender(name, step, [model]), rank, plain.placement)
    contenders = {name: Contender(name, step, [model]) for name, (model, step) in found.items()}
    return {"step": alternate(contenders, rounds), "cpu": alternate(contenders, rounds, time.thread_time)}


def schedules_of() -> dict[str, pipeflow.Schedule]:
    import pipeflow

    plain = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    every = plain.to_csv()
    for stage in range(RANKS):
        for microbatch in range(MICROBATCHES):
            backward = f"{stage}B{microbatch}"
            every = every.replace(backward, f"{stage}C{microbatch},{backward}")
    return {
        "nothing recomputed": plain,
        "C of every microbatch": pipeflow.Schedule.from_csv(every),
        "with_recompute": pipeflow.with_recompute(plain),
    }


def contender(task: Any, stage: Any, plain: pipeflow.Schedule, schedule: pipeflow.Schedule) -> tuple[Any, Any]:
    """A pipeline of this rank's stage, and the function that runs its step."""
    import pipeflow

    model = pipeflow.Pipeline(stage, plain, criterion=task.criterion, tensor_shape=task.shape)
    batch = (task.inputs, task.labels)
    return model, lambda: pipeflow.execute_pipeline(iter([batch]), model, schedule=schedule)


def checkpointed(parts: Any) -> Any:
    """The parts one after the other, each in a checkpoint of its own."""
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, hidden: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.part, hidden, use_reentrant=False)
            return output

    return nn.Sequential(*map(Checkpointed, parts))
