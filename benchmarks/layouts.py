"""Layouts on this machine: eight of one GPT on 4 processes, planned after `pipeflow calibrate`, and measured.

Each layout has processes of its own, since a layout is set when they start; rounds go over all layouts in turn.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, BATCH, STEPS = 4, 16, 5  # steps of a round, after two that are not counted
SIZES: dict[str, Any] = {"layers": 8, "hidden": 256, "heads": 8, "positions": 128, "vocabulary": 4096}
NAMES = {  # of the sizes, as GPTStage has them
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "vocabulary": "vocab_size",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline 4": {"pipeline": 4, "size": 2},
    "pipeline 4, small microbatches": {"pipeline": 4, "size": 1},
    "pipeline 4, zb-h1": {"pipeline": 4, "size": 2, "schedule": "zb-h1"},
    "pipeline 2, 2 chunks, data 2": {"pipeline": 2, "data": 2, "size": 2, "schedule": "interleaved-1f1b"},
    "pipeline 2 x tensor 2": {"pipeline": 2, "tensor": 2, "size": 4},
    "tensor 4": {"tensor": 4, "size": 4},
    "tensor 2 x data 2": {"tensor": 2, "data": 2, "size": 4},
    "data 4": {"data": 4, "size": 2},
}


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.json")
        command = [sys.executable, "-m", "pipeflow", "calibrate", "--ranks", str(RANKS), "--output", str(path)]
        subprocess.run(command, check=True, timeout=600)
        planned = {label: _planned(layout, path) for label, layout in LAYOUTS.items()}
    measured: dict[str, list[float]] = {label: [] for label in LAYOUTS}
    for _ in range(rounds):
        for label, layout in LAYOUTS.items():
            launch = {"pipeline": layout.get("pipeline", 1), "tensor": layout.get("tensor", 1)}
            options = {"launch": launch, "layout": layout}
            results = run_ranks("layouts:measure", RANKS, options, deadline=180.0)
            measured[label].append(statistics.median(map(max, zip(*results, strict=True))))
    return _report(planned, {label: statistics.median(each) for label, each in measured.items()}, rounds)


def _report(planned: dict[str, float], measured: dict[str, float], rounds: int) -> Report:
    title = f"layouts: a GPT of {SIZES['layers']} layers, {RANKS} processes, {rounds} rounds"
    report = Report("layouts", title, ["", "planned ms", "measured ms", "planned / measured"])
    report.data = {"planned seconds": planned, "measured seconds": measured}
    for label, seconds in planned.items():
        cells = f"{1e3 * seconds:.1f}", f"{1e3 * measured[label]:.1f}", f"{seconds / measured[label]:.3f}"
        report.rows.append([label, *cells])
    picked, best = min(planned, key=planned.__getitem__), min(measured, key=measured.__getitem__)
    loss = measured[picked] / measured[best] - 1
    report.notes.append(f"picked: {picked}, {loss:.1%} slower than the best measured, {best}")
    report.notes.append("targets: each within 0.85 and 1.15; the picked one at most 5 % slower than the best")
    return report


def _schedule(layout: dict[str, Any]) -> Any:
    import pipeflow

    name, ranks = layout.get("schedule", "1f1b"), layout.get("pipeline", 1)
    options = {"chunks": 2} if name == "interleaved-1f1b" else {}
    microbatches = BATCH // (layout["size"] * layout.get("data", 1))
    return pipeflow.make_schedule(name, ranks=ranks, microbatches=microbatches, **options)


def _planned(layout: dict[str, Any], path: Path) -> float:
    import pipeflow

    model, cluster = pipeflow.GPT(**SIZES), pipeflow.Cluster.load(path)
    setup = pipeflow.Setup(
        tensor=layout.get("tensor", 1),
        data=layout.get("data", 1),
        microbatch_size=layout["size"],
        precision=pipeflow.PRECISIONS["float32"],
    )
    seconds = pipeflow.plan(model, _schedule(layout), setup, cluster=cluster).step_seconds
    assert seconds is not None  # there is a cluster
    return seconds


def measure(layout: dict[str, Any]) -> list[float]:
    """On every rank: the times of steps."""
    import torch

    import pipeflow
    from pipeflow.models import GPTLMLoss, build_gpt_pipeline

    schedule, generator = _schedule(layout), torch.Generator().manual_seed(0)
    sizes: dict[str, Any] = {theirs: SIZES[ours] for ours, theirs in NAMES.items()}
    stages = build_gpt_pipeline(SIZES["layers"], placement=schedule.placement, **sizes)
    model = pipeflow.Pipeline(stages, schedule, criterion=GPTLMLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = BATCH // layout.get("data", 1)
    ids = torch.randint(SIZES["vocabulary"], (samples, SIZES["positions"]), generator=generator)
    times = []
    for number in range(2 + STEPS):
        torch.distributed.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        pipeflow.execute_pipeline(iter([({"input_ids": ids}, ids)]), model)
        optimizer.step()
        if number >= 2:
            times.append(time.perf_counter() - start)
    return times
