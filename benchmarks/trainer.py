"""What a Trainer costs: an epoch with no hook, and one with the usual hooks and progress, beside a bare loop on
execute_pipeline; one model, its batches and optimizer on 2 ranks.

A bare loop is zero_grad, execute_pipeline and the optimizer's step. The hooks measure rates, throughput, times, memory
and the bubble, log by step and by epoch, write for TensorBoard where it is installed, and show progress as on a
terminal of 120 columns, which goes nowhere.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES = 2, 8
SIZES = {"width 128": (128, 100), "width 64": (64, 100)}  # how wide blocks are, and steps of an epoch
BARE, NONE, ALL = "bare loop", "Trainer, no hooks", "Trainer, usual hooks and progress"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    results = run_ranks("trainer:measure", RANKS, {"rounds": rounds}, deadline=300 + 100 * rounds)
    seconds = step_times([each["seconds"] for each in results])
    cpu = {name: [sum(both) for both in zip(*(each["cpu"][name] for each in results), strict=True)] for name in seconds}
    title = f"trainer: {RANKS} ranks, {MICROBATCHES} microbatches, 4 blocks, {rounds} rounds of an epoch"
    columns = ["", "ms a step", "x bare loop", "CPU ms a step", "x bare loop, CPU"]
    report = Report("trainer", title, columns, data={"seconds": seconds, "cpu": cpu})
    for label in seconds:
        size = label.split(":")[0]
        cells = [
            cell
            for times in (seconds, cpu)
            for cell in (
                f"{1e3 * statistics.median(times[label]) / SIZES[size][1]:.2f}",
                f"{paired(times, label, f'{size}: {BARE}'):.4f}",
            )
        ]
        report.rows.append([label, *cells])
    report.notes.append(
        "target: with all hooks at most 1.02 x the bare loop; ratios are medians over rounds, of the same round"
    )
    report.notes.append("CPU: of the main threads of both ranks together, while nothing else is asked of them")
    epochs = ", ".join(f"{steps} steps with {size}" for size, (_, steps) in SIZES.items())
    report.notes.append(f"an epoch is {epochs}; one of its steps is measured for the bubble, as is usual of 100")
    return report


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: the times of epochs."""
    import logging

    import torch

    from benchmarks.compute import make_task
    from benchmarks.measure import alternate

    logging.getLogger("pipeflow").addHandler(logging.StreamHandler(open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115  # to the end
    logging.getLogger("pipeflow").setLevel(logging.INFO)
    found: dict[str, Times] = {"seconds": {}, "cpu": {}}
    with tempfile.TemporaryDirectory() as folder:
        for size, (width, steps) in SIZES.items():
            task = make_task(MICROBATCHES, width=width)
            cpu: Times = {}
            contenders = {f"{size}: {name}": each for name, each in _contenders(task, steps, folder).items()}
            for name, each in contenders.items():
                contenders[name] = replace(each, step=_timed(each.step, cpu.setdefault(name, [])))
            found["seconds"] |= alternate(contenders, rounds)
            found["cpu"] |= {name: seconds[1:] for name, seconds in cpu.items()}  # the first is the warm-up
            torch.distributed.barrier()
    return dict(found)


def _timed(step: Callable[[], object], cpu: list[float]) -> Callable[[], None]:
    """The same, which notes this thread's CPU time."""

    def run() -> None:
        start = time.thread_time()
        step()
        cpu.append(time.thread_time() - start)

    return run


def _contenders(task: Any, steps: int, folder: str) -> dict[str, Any]:
    import torch

    from benchmarks import pipeflow_side
    from benchmarks.task import Contender
    from pipeflow.training import Engine

    rank, batches = int(os.environ["RANK"]), [(task.inputs, task.labels)] * steps
    ways: dict[str, Callable[[Any], None]] = {
        BARE: partial(_loop, batches=batches),
        NONE: partial(_fit, batches=batches, folder=None),
        ALL: partial(_fit, batches=batches, folder=folder),
    }
    model = pipeflow_side.pipeline(task, rank, "1f1b")  # one for all, so that nothing else differs
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return {name: Contender(name, partial(way, engine), [model], model) for name, way in ways.items()}


def _loop(engine: Any, batches: list[Any]) -> None:
    import pipeflow

    data = iter(batches)
    for _ in range(len(batches)):
        engine.optimizer.zero_grad()
        pipeflow.execute_pipeline(data, engine.model)
        engine.optimizer.step()


def _fit(engine: Any, batches: list[Any], folder: str | None) -> None:
    from pipeflow.training import Trainer

    hooks = [] if folder is None else _hooks(folder)
    Trainer(engine, hooks, progress=folder is not None).fit(batches, 1)


def _hooks(folder: str) -> list[Any]:
    from rich.console import Console

    from pipeflow.training import LogHook, ProgressHook, TensorBoardHook, ThroughputHook, TimingHook

    console = Console(file=open(os.devnull, "w", encoding="utf-8"), force_terminal=True, width=120)  # noqa: SIM115  # closed by its end
    usual = [
        ThroughputHook(tokens_per_sample=128, flops_per_sample=1e9, peak=1e12),
        TimingHook(),
        LogHook(every=10),
        ProgressHook(console),
    ]
    return [*usual, TensorBoardHook(folder)] if find_spec("tensorboard") else usual
