"""Replanning: a stage becomes 1.5 times slower than planned; what the schedule that is found under the measured costs
gains when it runs, beside what its plan promised.

4 processes whose stages sleep, in forwards and in both halves of backwards, so that cores are not what is measured.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report
from pipeflow.engine.deferral.products import Deferral

RANKS, MICROBATCHES, WIDTH = 4, 12, 16
SECONDS, SLOW_STAGE, FACTOR = 0.006, 1, 1.5  # of F, I and W each
BEFORE, AFTER = "1f1b", "replanned"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 11
    results = run_ranks("replan:measure", RANKS, {"rounds": rounds}, deadline=120 + 6 * rounds)
    times, name, promised = step_times([each["times"] for each in results]), results[0]["name"], results[0]["promised"]
    gain = 1 - paired(times, AFTER, BEFORE)
    title = f"replan: {RANKS} ranks, {MICROBATCHES} microbatches, stage {SLOW_STAGE} takes {FACTOR} x, {rounds} rounds"
    report = Report("replan", title, ["", "median ms", "gain", "promised", "gain / promised"], data={"seconds": times})
    report.rows.append([BEFORE, f"{1e3 * statistics.median(times[BEFORE]):.1f}", "", "", ""])
    cells = [f"{1e3 * statistics.median(times[AFTER]):.1f}", f"{gain:.1%}", f"{promised:.1%}", f"{gain / promised:.2f}"]
    report.rows.append([f"{AFTER}: {name}", *cells])
    report.notes.append("target: gain / promised at least 0.8")
    return report


class _Sleep(Function):
    """Multiplies by a weight, and sleeps in its forward and in the first half of its backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, stage: SleepStage, deferral: Deferral) -> Tensor:
        ctx.stage, ctx.deferral = stage, deferral
        ctx.save_for_backward(hidden)
        time.sleep(stage.seconds)
        return hidden * stage.scale.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        time.sleep(ctx.stage.seconds)
        (hidden,) = ctx.saved_tensors
        ctx.deferral.take(([ctx.stage.scale], partial(_slept, ctx.stage, (gradient * hidden).sum(0))))
        return None, gradient * ctx.stage.scale.detach(), None, None


def _slept(stage: SleepStage, gradient: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """The second half: it sleeps, too."""
    time.sleep(stage.seconds)
    return [(stage.scale, gradient)]


class SleepStage(nn.Module):
    """A stage whose backward splits into halves that sleep."""

    deferral: Deferral | None = None

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def deferred_parameters(self) -> list[nn.Parameter]:
        return [self.scale]

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.deferral is not None  # a Pipeline's chunk has one
        output: Tensor = _Sleep.apply(self.deferral.anchor, hidden, self, self.deferral)  # type: ignore[no-untyped-call]  # torch's
        return output


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: traces a step, plans again, and takes the times of both schedules."""
    import pipeflow
    from benchmarks.measure import alternate
    from benchmarks.task import Contender

    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    inputs, labels = torch.randn(2, 2 * MICROBATCHES, WIDTH)
    stage = SleepStage(SECONDS * (FACTOR if rank == SLOW_STAGE else 1))
    before = pipeflow.make_schedule(BEFORE, ranks=RANKS, microbatches=MICROBATCHES)
    model = pipeflow.Pipeline(nn.ModuleList([stage]), before, criterion=functional.mse_loss, tensor_shape=(2, WIDTH))

    def step(schedule: pipeflow.Schedule, *, trace: bool = False) -> pipeflow.Output:
        return pipeflow.execute_pipeline(iter([(inputs, labels)]), model, schedule=schedule, trace=trace)

    step(before)
    traced = step(before, trace=True).timeline
    box = [traced.to_json() if traced is not None and rank == 0 else ""]
    torch.distributed.broadcast_object_list(box)
    found = pipeflow.replan(pipeflow.Timeline.from_json(box[0]))
    best = found.best.schedule
    contenders = {
        name: Contender(name, partial(step, schedule), [model], model)
        for name, schedule in ((BEFORE, before), (AFTER, best))
    }
    times: Times = alternate(contenders, rounds)
    return {"times": times, "name": best.name, "promised": found.gain(found.best)}
