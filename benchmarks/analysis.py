"""Plans as values, at scale: 1F1B for 64 ranks and 1,024 microbatches, and ZB-H1 (F, I, W) for 64 and 512: made,
verified, simulated, their critical path followed, drawn in every form, lowered, and the programs verified.

Beside it, what torch.distributed.pipelining can do with the same schedules through its private functions: its own
generator makes another order than the one it runs, which its validator refuses, so the others are given ours.
"""

from __future__ import annotations

import gc
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pipeflow
from benchmarks.processes import ROOT
from benchmarks.report import Report

RANKS = 64
SCHEDULES = {"1f1b": 1024, "zb-h1": 512}  # -> microbatches
STARTS = {
    "pipeflow list": ["-m", "pipeflow", "list"],
    "import torch.distributed.pipelining": ["-c", "import torch.distributed.pipelining"],
    "python alone": ["-c", "pass"],
}
Work = dict[str, Callable[[], object]]


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 3
    sizes = " and ".join(f"{name} with {microbatches}" for name, microbatches in SCHEDULES.items())
    title = f"analysis: {RANKS} ranks, {sizes} microbatches, median of {rounds} rounds"
    report = Report("analysis", title, ["", "pipeflow s", "torch s"])
    times: dict[str, list[float]] = {}
    for name, microbatches in SCHEDULES.items():
        ours, theirs = _ours(name, microbatches), _theirs(name, microbatches)
        for number in range(rounds):
            for label, work in ours.items():
                times.setdefault(f"pipeflow: {name}: {label}", []).append(_timed(work))
            for label, work in theirs.items():
                if number == 0 or label != "lower":  # torch's lowering takes as long as all the rest
                    times.setdefault(f"torch: {name}: {label}", []).append(_timed(work))
        for label in (f"{name}: {label}" for label in ours):
            report.rows.append([label, *(_median(times, f"{side}: {label}") for side in ("pipeflow", "torch"))])
    report.data["seconds"] = times
    _add_starts(report, rounds)
    report.notes += [
        "target: at most 1 s to make, to verify and to simulate each; pipeflow list in at most 0.15 s",
        "seconds are the CPU's, but for the starts",
        "torch's verify counts actions per stage; its simulate knows no durations; its lowering ran once",
    ]
    return report


def _median(times: dict[str, list[float]], label: str) -> str:
    return f"{statistics.median(times[label]):.2f}" if label in times else "none"


def _timed(work: Callable[[], object]) -> float:
    gc.collect()
    gc.freeze()  # what the other contenders keep is not walked again
    start = time.process_time()  # one thread, no waiting: whoever else is on the machine does not count
    work()
    elapsed = time.process_time() - start
    gc.unfreeze()
    return elapsed


def _ours(name: str, microbatches: int) -> Work:
    from pipeflow.core.soundness.transfers import verify_programs

    schedule = pipeflow.make_schedule(name, ranks=RANKS, microbatches=microbatches)
    timeline, programs = pipeflow.simulate(schedule), pipeflow.lower(schedule)
    return {
        "make_schedule": lambda: pipeflow.make_schedule(name, ranks=RANKS, microbatches=microbatches),
        "verify": lambda: pipeflow.verify(schedule),
        "verify, with a memory cap": lambda: pipeflow.verify(schedule, memory_cap=RANKS),
        "simulate": lambda: pipeflow.simulate(schedule),
        "critical_path": lambda: pipeflow.critical_path(replace(timeline)),
        **_drawings(timeline),
        "lower": lambda: pipeflow.lower(schedule),
        "verify_programs": lambda: verify_programs(programs),
    }


def _drawings(timeline: pipeflow.Timeline) -> Work:
    from rich.console import Console

    from pipeflow import draw

    def terminal() -> None:
        console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="truecolor")
        console.print(draw.Gantt(replace(timeline)))  # a copy has worked out nothing yet

    return {
        "draw in a terminal": terminal,
        "draw as SVG": lambda: draw.svg(replace(timeline)),
        "draw as a page": lambda: draw.html(replace(timeline)),
        "draw for Perfetto": lambda: draw.perfetto(replace(timeline)),
    }


def _theirs(name: str, microbatches: int) -> Work:
    from torch.distributed.pipelining import _schedule_visualizer as visualizer
    from torch.distributed.pipelining import schedules

    rows = pipeflow.make_schedule(name, ranks=RANKS, microbatches=microbatches).rows
    parse = schedules._Action.from_str
    actions: dict[int, Any] = {rank: [parse(str(action)) for action in row] for rank, row in enumerate(rows)}
    lowered: dict[int, Any] = {}

    def lower() -> None:
        sharded: dict[int, Any] = {rank: schedules._add_unshard_reshard(row) for rank, row in actions.items()}
        whole: dict[int, Any] = {rank: schedules._add_reduce_grad(row, microbatches) for rank, row in sharded.items()}
        lowered.update(schedules._add_send_recv(whole, lambda stage: stage, RANKS))

    def simulate() -> object:
        unknown = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # it refuses these of its lowering
        order = {
            rank: [each for each in row if each.computation_type.name not in unknown] for rank, row in lowered.items()
        }
        return schedules._simulate_comms_compute(order, lambda stage: stage, RANKS)

    made: Work = {"make_schedule": lambda: visualizer.get_schedule_ops("1F1B", RANKS, microbatches)}
    return (made if name == "1f1b" else {}) | {  # it has no ZB-H1
        "verify": lambda: schedules._validate_schedule(actions, RANKS, RANKS, microbatches),
        "lower": lower,
        "simulate": simulate,
    }


def _add_starts(report: Report, rounds: int) -> None:
    times: dict[str, list[float]] = {label: [] for label in STARTS}
    for _ in range(rounds + 2):
        for label, arguments in STARTS.items():
            command = [sys.executable, *arguments]
            start = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=120)
            times[label].append(time.perf_counter() - start)
    ours, theirs, alone = (f"{statistics.median(each):.2f}" for each in times.values())
    report.rows.append(["start: pipeflow list / import torch's pipelining", ours, theirs])
    report.notes.append(f"python alone starts in {alone} s")
    report.data["start seconds"] = times
