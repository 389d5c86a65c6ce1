"""A rank of an elastic world is killed in the middle of a step: how long until all ranks that are left have ended that
step, beyond what it takes them to compute it; and what a step costs that could be run again, while nobody dies.

On ranks whose stages sleep in their forwards. The peer is not timed beside it: there the job starts again.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Report

REPLICAS, RANKS, MICROBATCHES, WIDTH = 2, 2, 4, 64
STEPS, DIES = 8, 3
SECONDS = 0.02  # that a forward sleeps


def run(rounds: int | None = None) -> Report:
    from pipeflow.testing import run_processes

    rounds = rounds or 3
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch tells of every connection that closes
    size = REPLICAS * RANKS
    title = f"going_on: {REPLICAS} x {RANKS} ranks, 1F1B, seconds, {rounds} rounds"
    columns = ["killed", "from the kill to the end of the step", "a step after", "beyond", "slowest", "loss as without"]
    report = Report("going_on", title, columns, data={"killed": {}, "steps": {}})
    alive: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for elastic in (True, False):
            each = run_processes(train, size, -1, "", data=REPLICAS, elastic=elastic)
            alive[elastic].append(statistics.median(map(max, zip(*(it["steps"] for it in each), strict=True))))
            expected = each[-1]["losses"]
    for rank in range(size):
        beyond: list[float] = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                note = str(Path(folder, "moment"))
                results = run_processes(train, size, rank, note, data=REPLICAS, elastic=True, may_die=[rank])
                left = [each for each in results if each is not None]
                ended = max(each["ended"] for each in left) - float(Path(note).read_text(encoding="utf-8"))
            after = statistics.median(map(max, zip(*(each["steps"][DIES + 1 :] for each in left), strict=True)))
            beyond.append(ended - after)
        losses = next(each["losses"] for each in left if each["losses"])
        alike = all(abs(one - other) < 1e-9 for one, other in zip(losses, expected, strict=True))
        report.data["killed"][rank] = beyond
        figures = [f"{ended:.3f}", f"{after:.3f}", f"{statistics.median(beyond):.3f}", f"{max(beyond):.3f}"]
        report.rows.append([f"rank {rank}", *figures, str(alike)])
    report.data["steps"] = {"elastic": alive[True], "plain": alive[False]}
    ratio = statistics.median(alive[True]) / statistics.median(alive[False])
    report.notes += [
        "target: at most 2 s beyond a step of the ranks that are left",
        f"a step while nobody dies, elastic / not: {ratio:.3f}; target: 1.00",
    ]
    return report


def train(killed: int, note: str) -> dict[str, Any]:
    """On every rank: some steps, in one of which rank `killed` dies; when that step ended, and how long others took."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    import pipeflow
    from pipeflow.engine.parallel.context import current_context
    from pipeflow.testing import die

    context = current_context()
    mine, left, ended = context.rank == killed, DIES * MICROBATCHES + MICROBATCHES // 2, 0.0

    class Stage(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            time.sleep(SECONDS)
            if mine and left == 0:
                Path(note).write_text(str(time.monotonic()), encoding="utf-8")
                die()
            return super().forward(hidden)

    torch.manual_seed(context.pipeline_rank)
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    stage = Stage(WIDTH, WIDTH, dtype=torch.float64)
    model = pipeflow.Pipeline(stage, schedule, criterion=functional.mse_loss)
    optimizer = torch.optim.Adam(model.parameters())
    generator, steps, losses = torch.Generator().manual_seed(context.data_rank), list[float](), list[float]()
    for step in range(STEPS):
        batch = torch.randn(2, 2 * MICROBATCHES, WIDTH, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        begin = time.monotonic()
        loss = pipeflow.execute_pipeline(iter([tuple(batch)]), model).loss
        steps.append(time.monotonic() - begin)
        ended = time.monotonic() if step == DIES else ended
        optimizer.step()
        if loss is not None:
            losses.append(loss.item())
    return {"steps": steps, "ended": ended, "losses": losses}
