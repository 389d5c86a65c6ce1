"""torch's API on two engines: each of its schedules, run by torch and by pipeflow under the same names. Stages are real
blocks, and such that do nearly nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.compute import RANKS, milliseconds
from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

MICROBATCHES = 8
WIDTH, LENGTH, SAMPLES = 128, 64, 2  # samples of a microbatch
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 11
    results = run_ranks("pipelining:measure", RANKS, {"rounds": rounds}, deadline=240 + 12 * rounds)
    times = step_times([each["times"] for each in results])
    title = f"torch's API: {RANKS} ranks, {MICROBATCHES} microbatches, blocks of width {WIDTH}, {rounds} rounds"
    columns = ["", "torch, ms", "pipeflow, ms", "x torch"]
    report = Report("pipelining", title, columns, data={"seconds": times})
    for task in ("blocks", "nearly nothing"):
        for name in SCHEDULES:
            theirs, ours = f"{task}, {name}: torch", f"{task}, {name}: pipeflow"
            ratio = f"{paired(times, ours, theirs):.3f}"
            report.rows.append([f"{task}, {name}", milliseconds(times[theirs]), milliseconds(times[ours]), ratio])
    report.notes.append("target: at most 1 x torch; ratios are medians over rounds of two times of the same round")
    return report


def measure(rounds: int, names: Sequence[str] = SCHEDULES) -> dict[str, Any]:
    """On every rank: checks both engines' gradients, then takes the times."""
    import torch

    from benchmarks import torch_side, trivial
    from benchmarks.compute import make_task
    from benchmarks.measure import alternate
    from benchmarks.task import check
    from pipeflow import Placement
    from pipeflow.pipelining import schedules as ours

    rank = int(os.environ["RANK"])
    blocks = make_task(MICROBATCHES, width=WIDTH, length=LENGTH, samples=SAMPLES)
    tasks = {"blocks": blocks, "nearly nothing": trivial.make_task(RANKS, MICROBATCHES, linear=True)}
    times: Times = {}
    for label, task in tasks.items():
        for name in names:
            chunks = 1 if name in ("GPipe", "1F1B") else 2
            looped = Placement.looped(RANKS, chunks)
            placement = Placement.vee(RANKS) if name in ("ZBVZeroBubble", "DualPipeV") else looped
            pair = {
                f"{label}, {name}: torch": torch_side.contender(task, rank, name, placement),
                f"{label}, {name}: pipeflow": torch_side.contender(task, rank, name, placement, ours, "pipeflow"),
            }
            for contender in pair.values():
                check(task, contender, rank, placement)
            times |= alternate(pair, rounds)
            torch.distributed.barrier()
    return {"times": times}
