"""How long until every rank knows: an exception on one of 4 ranks, and `kill -9` of it, in the middle of a step.

The peer is not timed beside it: there a failed rank is waited for until the process group's own timeout.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import Report

RANKS, MICROBATCHES, WIDTH = 4, 8, 16
HOWS = ("exception", "kill -9")


def run(rounds: int | None = None) -> Report:
    from pipeflow.testing import run_processes

    rounds = rounds or 3
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch tells of every connection that closes
    title = f"failure: {RANKS} ranks, 1F1B, seconds until the last rank has raised, {rounds} rounds"
    report = Report("failure", title, ["", *(f"rank {rank} fails" for rank in range(RANKS)), "slowest"])
    for how in HOWS:
        seconds: list[list[float]] = []
        for rank in range(RANKS):
            seconds.append([])
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as folder:
                    note = str(Path(folder, "moment"))
                    killed = (rank,) if how == "kill -9" else ()
                    raised = run_processes(fail, RANKS, rank, how, note, may_die=killed)
                    moment = float(Path(note).read_text(encoding="utf-8"))
                seconds[rank].append(max(at for at in raised if at is not None) - moment)
        report.data[how] = seconds
        medians = [f"{statistics.median(each):.3f}" for each in seconds]
        report.rows.append([how, *medians, f"{max(map(max, seconds)):.3f}"])
    report.notes.append("target: at most 1 s")
    return report


def fail(rank: int, how: str, note: str) -> float:
    """On every rank: a good step, then one in which `rank` fails; when this rank raised its error."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    import pipeflow
    from pipeflow.engine.parallel.context import current_context

    mine = current_context().pipeline_rank == rank
    left = MICROBATCHES + MICROBATCHES // 2  # forwards until it fails

    class Stage(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            time.sleep(0.005)
            if mine and left == 0:
                Path(note).write_text(str(time.monotonic()), encoding="utf-8")
                if how == "kill -9":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("on purpose")
            return super().forward(hidden)

    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    model = pipeflow.Pipeline(Stage(WIDTH, WIDTH), schedule, criterion=functional.mse_loss)
    batch = (torch.zeros(MICROBATCHES, WIDTH), torch.zeros(MICROBATCHES, WIDTH))
    pipeflow.execute_pipeline(iter([batch]), model)
    try:
        pipeflow.execute_pipeline(iter([batch]), model)
    except pipeflow.PipelineError as error:
        moment = time.monotonic()
        if rank not in (error.rank, error.died):
            raise
        return moment
    raise AssertionError("the step did not fail")
