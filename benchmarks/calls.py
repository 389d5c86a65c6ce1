"""What running an action costs: Python calls, and CPU time, on a rank amid a pipeline of trivial stages.

Every microbatch there is per stage one F, one B (or I and W), two receives (posting and waiting) and two sends
(sending and releasing). Under interleaved-zb a stage is one linear layer, whose weight gradient is deferred. Calls are
the difference of a long and a short step, so that what a step does once is not in them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from typing import Any

from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MIDDLE = 3, 1
SHORT, LONG = 15, 45  # microbatches
SCHEDULES = {"1f1b": 1, "interleaved-1f1b": 2, "interleaved-zb": 2}  # name: chunks
PER_STAGE = {"P2P": 4, "F": 1, "B": 1, "I": 1, "W": 1, "rest": 6}  # of a microbatch; "rest" is shared by all


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 21
    middle = run_ranks("calls:measure", RANKS, {"rounds": rounds}, deadline=120 + 2 * rounds)[MIDDLE]
    title = f"calls: Python calls and CPU time per action, rank {MIDDLE} of {RANKS}, {LONG} microbatches"
    columns = ["", "calls per P2P", "per F", "per B", "per I", "per W", "rest, per action", "CPU us per action"]
    report = Report("calls", title, columns, data=middle)
    for label, seconds in middle["cpu"].items():
        actions = PER_STAGE["rest"] * LONG * SCHEDULES[label.split(":")[0]]
        calls = middle["calls"].get(label, {})
        row = [f"{calls[kind]:.1f}" if calls.get(kind) else "" for kind in PER_STAGE]
        report.rows.append([label, *row, f"{1e6 * statistics.median(seconds) / actions:.1f}"])
    report.notes.append("targets for pipeflow: at most 3 calls per P2P action, 8 per F, 12 per B, I or W")
    report.notes.append("not counted: functions in C, the user's module, torch.autograd; P2P: a receive or a send")
    report.notes.append(
        "CPU time: the main thread's, of whole steps; computation alone: module and autograd, no pipeline"
    )
    return report


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: per contender the calls per action and the CPU seconds of steps."""
    from benchmarks.measure import alternate
    from benchmarks.trivial import make_task

    rank = int(os.environ["RANK"])
    calls: dict[str, dict[str, float]] = {}
    cpu: dict[str, list[float]] = {}
    for name, chunks in SCHEDULES.items():
        counts: dict[int, dict[str, Counter[str]]] = {}
        for many in (SHORT, LONG):
            task = make_task(RANKS, many, linear=name == "interleaved-zb")
            contenders = _contenders(task, rank, name, chunks)
            counts[many] = {label: _count(each) for label, each in contenders.items()}
        for label, long in counts[LONG].items():
            calls[f"{name}: {label}"] = _per_action(long, counts[SHORT][label], chunks)
        contenders["computation alone"] = _alone(task, rank, chunks)
        times = alternate(contenders, rounds, clock=time.thread_time)
        cpu |= {f"{name}: {label}": seconds for label, seconds in times.items()}
    return {"calls": calls, "cpu": cpu}


def _contenders(task: Any, rank: int, name: str, chunks: int) -> dict[str, Any]:
    from benchmarks import pipeflow_side, torch_side
    from benchmarks.contenders import all_of

    if name != "interleaved-zb":
        return all_of(task, rank, name, chunks, unknown_shape=True)
    ours = pipeflow_side.contender(task, rank, name, chunks=chunks)
    return {"torch": torch_side.interleaved_zero_bubble(task, rank, chunks), "pipeflow": ours}


def _count(contender: Any) -> Counter[str]:
    from benchmarks import count

    category = {"torch": count.of_torch, "by hand": count.by_hand}.get(contender.name, count.of_pipeflow)
    contender.zero_grad()
    contender.step()
    return count.count_calls(contender.step, category)


def _per_action(long: Counter[str], short: Counter[str], chunks: int) -> dict[str, float]:
    return {kind: (long[kind] - short[kind]) / ((LONG - SHORT) * chunks * each) for kind, each in PER_STAGE.items()}


def _alone(task: Any, rank: int, chunks: int) -> Any:
    """The same forwards and backwards on this rank without any transfer."""
    import torch

    from benchmarks.task import Contender

    modules = task.chunks_of(rank, chunks)
    inputs = [torch.randn(task.shape) for _ in range(task.microbatches)]
    gradient = torch.randn(task.shape)

    def step() -> None:
        for module in modules:
            for hidden in inputs:
                module(hidden.detach().requires_grad_()).backward(gradient)

    return Contender("computation alone", step, modules)
