"""Explaining a large trace: 64 ranks, 512 microbatches and about 200 MB of Chrome traces, made up from a simulation of
1F1B. The command runs in a process of its own, whose time and memory count.
"""

from __future__ import annotations

import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pipeflow
from benchmarks.report import Report
from pipeflow.core.action import Kind
from pipeflow.core.timeline import Row

RANKS, MICROBATCHES = 64, 512
OPERATORS = 13  # of each action, so that all files have 200 MB
COLUMNS = ["trace", "files MB", "seconds", "of a processor", "peak MB", "explained as", "said while it ran"]


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 1
    report = Report("explain_large", f"explain: a large trace, {rounds} rounds", COLUMNS, data={"seconds": []})
    with tempfile.TemporaryDirectory() as folder:
        size = sum(write(Path(folder)))
        found = [_explain(folder) for _ in range(rounds)]
    report.data["seconds"] = [seconds for seconds, _, _ in found]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak, busy = used.ru_maxrss / 1024, (used.ru_utime + used.ru_stime) / rounds
    _, shown, said = found[-1]
    report.rows.append(
        [
            f"{RANKS} ranks, {MICROBATCHES} microbatches",
            f"{size / 1e6:.0f}",
            f"{statistics.median(report.data['seconds']):.1f}",
            f"{busy:.1f}",
            f"{peak:.0f}",
            shown.splitlines()[0],
            said.splitlines()[0] if said else "nothing",
        ]
    )
    report.notes.append("target: 60 s and 2 GB, with progress")
    return report


def write(folder: Path) -> Iterator[int]:
    """Writes a file per rank. Yields their sizes in bytes."""
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    chance = random.Random(0)
    times = [0.01 * chance.uniform(0.8, 1.2) for _ in range(RANKS)]
    cost = pipeflow.CostModel(tuple(times), tuple(times), tuple(times), latency=0.0003)
    for rank, row in enumerate(pipeflow.simulate(schedule, cost).rows):
        whole = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS},
            "traceEvents": list(_events(row)),
        }
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps(whole), encoding="utf-8")
        yield path.stat().st_size


def _events(row: Row) -> Iterator[dict[str, Any]]:
    """The events of a rank: annotations that begin when the rank is free, and the operators inside of them."""
    free, number, numbers = 0.0, 0, {}
    for span in row:
        action, start, end = span.action, span.start, span.end
        yield _event("user_annotation", f"PP:{action}", free, end, {})
        yield _event("cpu_op", "c10d::recv_", free, free + 1e-6, {})
        is_forward = action.kind is Kind.F
        if is_forward:
            numbers[action.microbatch] = number = number + OPERATORS
        for place in range(OPERATORS):
            first, last = (start + (end - start) * (place + each) / OPERATORS for each in (0, 1))
            own = numbers[action.microbatch] + (place if is_forward else OPERATORS - 1 - place)
            name = "aten::mm" if is_forward else "autograd::engine::evaluate_function: MmBackward0"
            given = {"Sequence number": own, "Fwd thread id": 0 if is_forward else 1, "Record function id": own}
            yield _event("cpu_op", name, first, last, given)
        free = end


def _event(category: str, name: str, start: float, end: float, given: dict[str, int]) -> dict[str, Any]:
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": given}


def _explain(folder: str) -> tuple[float, str, str]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "pipeflow", "explain", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout, re.sub(r"\s*\n\s*", "; ", done.stderr.strip())
