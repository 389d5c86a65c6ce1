"""Zero bubble on real blocks: ZB-V beside 1F1B, here and in torch, whose split backward costs more than it saves.

Transformer blocks on 2 ranks with few microbatches, where the bubble is large, and short sequences: attention has an
input-gradient half and no weight-gradient half, so the longer they are the less the halves are alike, which ZB-V needs.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.compute import BLOCKS, RANKS, milliseconds
from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

MICROBATCHES = 4
WIDTH, LENGTH, SAMPLES = 256, 64, 4  # samples of a microbatch
BASE, THEIRS = "1f1b: pipeflow", "zb-v: torch"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 15
    results = run_ranks("zero_bubble:measure", RANKS, {"rounds": rounds}, deadline=120 + 6 * rounds)
    times = step_times([each["times"] for each in results])
    size = f"{RANKS} ranks, {MICROBATCHES} microbatches, {BLOCKS} blocks of width {WIDTH}, {SAMPLES} x {LENGTH}"
    columns = ["", "median ms", "x 1f1b of pipeflow", "x 1f1b of torch", "x zb-v of torch", "Python calls"]
    calls = {label: [each["calls"][label] for each in results] for label in times}
    data = {"seconds": times, "calls": calls}
    report = Report("zero_bubble", f"zero bubble: {size}, {rounds} rounds", columns, data=data)
    for label in times:
        against = [f"{paired(times, label, other):.3f}" for other in (BASE, "1f1b: torch", THEIRS)]
        report.rows.append([label, milliseconds(times[label]), *against, f"{max(calls[label])}"])
    report.notes.append("target for zb-v: 0.88 x 1f1b of pipeflow and x zb-v of torch; 0.83 is what the plan promises")
    report.notes.append("fused: with gradient_accumulation_fusion")
    report.notes.append("Python calls: of a step on the rank that has the most, with those of the module and of torch")
    report.notes.append("ratios are medians over rounds of two times of the same round")
    return report


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: checks every contender's gradients, takes the times, then counts calls."""
    from benchmarks import pipeflow_side, torch_side
    from benchmarks.compute import make_task
    from benchmarks.count import all_calls
    from benchmarks.measure import alternate
    from benchmarks.task import check
    from pipeflow import Placement

    task = make_task(MICROBATCHES, width=WIDTH, length=LENGTH, samples=SAMPLES)
    rank = int(os.environ["RANK"])
    linear, vee = Placement.linear(RANKS), Placement.vee(RANKS)
    fused = {"gradient_accumulation_fusion": True}
    contenders = {
        BASE: (pipeflow_side.contender(task, rank, "1f1b"), linear),
        "zb-h1: pipeflow": (pipeflow_side.contender(task, rank, "zb-h1"), linear),
        "zb-v: pipeflow": (pipeflow_side.contender(task, rank, "zb-v"), vee),
        "1f1b: pipeflow, fused": (pipeflow_side.contender(task, rank, "1f1b", **fused), linear),
        "zb-v: pipeflow, fused": (pipeflow_side.contender(task, rank, "zb-v", **fused), vee),
        "1f1b: torch": (torch_side.one_f_one_b(task, rank), linear),
        THEIRS: (torch_side.zero_bubble_v(task, rank), vee),
    }
    for contender, placement in contenders.values():
        check(task, contender, rank, placement)
    times: Times = alternate({label: contender for label, (contender, _) in contenders.items()}, rounds)
    calls = {label: all_calls(contender.step) for label, (contender, _) in contenders.items()}  # all is made by now
    return {"times": times, "calls": calls}
