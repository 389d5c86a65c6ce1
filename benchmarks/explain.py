"""Explaining torch's own pipelines: each schedule of torch.distributed.pipelining runs on gloo and is recorded by
torch.profiler. `pipeflow.explain` rebuilds it from the traces and replays it. The fastest order that it finds goes back
into torch as a table, and both orders run in turns: what the new one gains, beside what was promised.

Stages sleep, in forwards and in both halves of backwards, so that cores are not what is measured.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.processes import run_ranks
from benchmarks.report import Report

WIDTH, BATCH = 16, 2
SECONDS = 0.008  # of F, I and W of a rank's whole share
SPEEDS = (1.0, 1.4, 0.8, 1.2)  # stages differ
RECORDED = 5  # steps
CASES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
"""torch's schedules, each with its number of stages per rank."""
COLUMNS = [
    "schedule",
    "ranks",
    "rebuilt",
    "without names",
    "step ms",
    "replayed",
    "best order",
    "promised",
    "gained",
    "off by",
]


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 7
    title = f"explain: torch's schedules, stages that differ, gloo, {rounds} rounds"
    report = Report("explain", title, COLUMNS, data={"seconds": {}})
    for ranks in (2, 4):
        for name, chunks in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                options = {"name": name, "chunks": chunks, "rounds": rounds, "folder": folder}
                found = run_ranks("explain:measure", ranks, options, deadline=180 + 4 * rounds)
            report.rows.append(_row(name, ranks, found))
            report.data["seconds"][f"{name} on {ranks}"] = [each["times"] for each in found]
    report.notes.append("without names: the same trace without its annotations is rebuilt, or refused, but never NO")
    report.notes.append("target: rebuilt action for action; replayed within 3 % of the step; off by at most 5 % of it")
    return report


def _row(name: str, ranks: int, found: list[dict[str, Any]]) -> list[str]:
    import pipeflow

    told = found[0]
    rows = [row for each in found for row in each["row"]]
    single = pipeflow.Schedule.from_csv("\n".join(rows)).without_pairs().to_csv().splitlines()  # names alone say pairs
    steps = {
        order: statistics.median(map(max, zip(*(each["times"][order] for each in found), strict=True)))
        for order in ("own", "best")
    }
    gained, promised = 1 - steps["best"] / steps["own"], told["promised"]
    return [
        name,
        str(ranks),
        "yes" if told["rebuilt"] == rows else "NO",
        "refused" if told["nameless"] is None else "yes" if told["nameless"] == single else "NO",
        f"{1e3 * told['measured']:.1f}",
        f"{told['replayed'] / told['measured'] - 1:+.1%}",
        told["best"],
        f"{promised:.1%}",
        f"{gained:.1%}",
        f"{gained - promised:+.1%}",
    ]


class _InputSleep(Function):
    """Passes a value on, and sleeps in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _WeightSleep(Function):
    """Passes a weight on, and sleeps in the backward: the second half."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepStage(nn.Module):
    """A stage that sleeps, which torch can split into halves: input and weight are on different nodes of the graph."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        passed: Tensor = _InputSleep.apply(hidden, self.seconds)  # type: ignore[no-untyped-call]  # torch's
        weight: Tensor = _WeightSleep.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]  # torch's
        return passed * weight


class TorchRun:
    """One of torch's schedules, or a table that its runtime loads, on this rank."""

    def __init__(self, name: str, chunks: int, microbatches: int, table: Path | None = None) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        count = ranks * chunks
        is_vee = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        own = [rank, count - 1 - rank] if is_vee else [rank + chunk * ranks for chunk in range(chunks)]
        device = torch.device("cpu")
        modules = [SleepStage(SECONDS / chunks * SPEEDS[stage % len(SPEEDS)]) for stage in own]
        stages = [PipelineStage(each, stage, count, device) for each, stage in zip(modules, own, strict=True)]
        loss = nn.MSELoss()
        if table is not None:
            self.schedule: Any = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss)
            self.schedule._load_csv(str(table))
        else:
            made = getattr(schedules, name)
            self.schedule = made(stages if chunks > 1 else stages[0], microbatches, loss_fn=loss)
        self.inputs = (torch.randn(microbatches * BATCH, WIDTH),) if 0 in own else ()
        self.labels = {"target": torch.randn(microbatches * BATCH, WIDTH)} if count - 1 in own else {}

    def step(self) -> float:
        """Runs a step that begins on all ranks together. Returns its seconds on this rank."""
        torch.distributed.barrier()
        start = time.perf_counter()
        self.schedule.step(*self.inputs, **self.labels, losses=[] if self.labels else None)
        torch.distributed.barrier()
        return time.perf_counter() - start


def record(run: TorchRun, folder: Path) -> None:
    """Writes a trace of some steps of this rank."""
    from torch.profiler import ProfilerActivity, profile, schedule

    rank = os.environ["RANK"]
    plan = schedule(wait=0, warmup=1, active=RECORDED, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=lambda each: each.export_chrome_trace(str(folder / f"rank{rank}.json")),
    ) as recorder:
        for _ in range(1 + RECORDED):
            run.step()
            recorder.step()


def nameless(folder: Path) -> list[str] | None:
    """The order that traces show without their annotations; None if it is refused."""
    import pipeflow

    with tempfile.TemporaryDirectory() as bare:
        for path in folder.glob("*.json"):
            whole = json.loads(path.read_text(encoding="utf-8"))
            whole["traceEvents"] = [each for each in whole["traceEvents"] if not each.get("name", "").startswith("PP:")]
            Path(bare, path.name).write_text(json.dumps(whole), encoding="utf-8")
        try:
            found = pipeflow.explain([bare])
        except pipeflow.UsageError:
            return None
    return found.schedule.to_csv().splitlines() if isinstance(found, pipeflow.Explanation) else None


def measure(name: str, chunks: int, rounds: int, folder: str) -> dict[str, Any]:
    """On every rank: records a schedule of torch, explains it on rank 0, and takes the times of both orders."""
    import pipeflow

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pipeflow.launch(pipeline=ranks, device="cpu")
    torch.manual_seed(0)
    microbatches = 4 * ranks
    own = TorchRun(name, chunks, microbatches)
    for _ in range(2):
        own.step()
    record(own, Path(folder))
    torch.distributed.barrier()
    told: dict[str, Any] = {}
    table = Path(folder, "best.csv")
    if rank == 0:
        found = pipeflow.explain([folder])
        assert isinstance(found, pipeflow.Explanation)
        assert found.replanned is not None
        assert found.best is not None
        table.write_text(found.best.schedule.to_csv(), encoding="utf-8")
        told = {
            "rebuilt": found.schedule.to_csv().splitlines(),
            "nameless": nameless(Path(folder)),
            "measured": found.timeline.makespan,
            "replayed": found.replanned.now.timeline.makespan,
            "best": found.best.schedule.name,
            "promised": found.replanned.gain(found.best),
        }
    torch.distributed.barrier()
    best = TorchRun(name, chunks, microbatches, table)
    times: dict[str, list[float]] = {"own": [], "best": []}
    for each in (own, best):
        each.step()
    for _ in range(rounds):
        times["own"].append(own.step())
        times["best"].append(best.step())
    return {"times": times, "row": _row_of(name, own.schedule, ranks, microbatches, rank), **told}


def _row_of(name: str, schedule: Any, ranks: int, microbatches: int, rank: int) -> list[str]:
    """The order that torch runs on this rank, as a line of a table."""
    import pipeflow

    if name in ("ScheduleGPipe", "Schedule1F1B"):
        ours = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}[name]
        made = pipeflow.make_schedule(ours, ranks=ranks, microbatches=microbatches)
        return [made.to_csv().splitlines()[rank]]
    return [",".join(str(action) for action in schedule.pipeline_order[rank] if action is not None)]
