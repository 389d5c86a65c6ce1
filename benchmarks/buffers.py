"""Memory for what is received: the most receive buffers alive at once, 1F1B on 2 ranks with 32 microbatches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES = 2, 32


def run(rounds: int | None = None) -> Report:
    """`rounds` changes nothing: a count needs one."""
    results = run_ranks("buffers:measure", RANKS, {}, deadline=120)
    title = f"buffers: receive buffers, 1F1B, {RANKS} ranks, {MICROBATCHES} microbatches"
    report = Report("buffers", title, ["", *(f"rank {rank}" for rank in range(RANKS))], data={"buffers": results})
    report.rows += [[label, *(str(each[label]) for each in results)] for label in results[0]]
    report.notes.append("rank 0 receives gradients, rank 1 activations, which their backward still needs")
    return report


def measure() -> dict[str, int]:
    """On every rank: the program's number, and those that were allocated."""
    import pipeflow
    from benchmarks import by_hand, pipeflow_side, torch_side
    from benchmarks.trivial import make_task

    task, rank = make_task(RANKS, MICROBATCHES), int(os.environ["RANK"])
    program = pipeflow.lower(pipeflow_side.schedule_of(task, "1f1b", 1))[rank]
    ours = pipeflow_side.contender(task, rank, "1f1b")
    hand = by_hand.loop(task, rank)
    return {
        "pipeflow, planned": program.receive_buffers,
        "pipeflow, allocated": _most_alive(ours.step, task.shape),
        "torch, allocated": _of_torch(torch_side.one_f_one_b(task, rank)),
        "by hand, allocated": _most_alive(hand.step, task.shape),
    }


def _most_alive(step: Callable[[], object], shape: tuple[int, ...]) -> int:
    """The most tensors of `shape` from `torch.empty` alive at once in a first step."""
    with _watched(shape) as alive:
        step()
    return alive["most"]


@contextmanager
def _watched(shape: tuple[int, ...]) -> Iterator[dict[str, int]]:
    import weakref

    import torch

    real, alive = torch.empty, {"now": 0, "most": 0}

    def gone() -> None:
        alive["now"] -= 1

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = real(*arguments, **options)
        if tensor.shape == shape and not tensor.is_meta:  # as the loss is read on
            alive["now"] += 1
            alive["most"] = max(alive["most"], alive["now"])
            weakref.finalize(tensor, gone)
        return tensor

    torch.empty = empty
    try:
        yield alive
    finally:
        torch.empty = real


def _of_torch(contender: Any) -> int:
    """The buffers that torch's stage holds after a step, for activations and gradients, per microbatch."""
    contender.step()
    stage = contender.runner._stage
    infos = [info for by_chunk in (stage.args_recv_info, stage.grad_recv_info) for info in by_chunk.values()]
    return sum(getattr(one, "buffer", None) is not None for info in infos for one in info)
