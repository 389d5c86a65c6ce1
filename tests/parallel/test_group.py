"""Groups compute the same over threads and over gloo, and a lost rank wakes the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Alone, Group, LinkError, Work
from pipeflow.testing import run_processes, run_threads

Run = Callable[..., list[Any]]
RUNS = pytest.mark.parametrize("run", [run_threads, run_processes])


def collectives(group: Group) -> dict[str, list[float]]:
    """One of each kind, started together and waited for in reverse."""
    mine = float(group.rank + 1)
    total, largest = torch.full((2,), mine), torch.tensor([mine, -mine])
    whole, part = torch.empty(group.size, 2), torch.tensor([[mine, 10 * mine]])
    piece, pieces = torch.empty(1), mine * torch.arange(1.0, group.size + 1)
    told = torch.tensor([mine])
    counts = [(group.rank + other) % 3 for other in range(group.size)]  # from a rank to another as many as back
    rows, swapped = torch.full((sum(counts), 2), mine), torch.empty(sum(counts), 2)
    works = [
        group.all_reduce(total),
        group.all_reduce_max(largest),
        group.all_gather(whole, part),
        group.reduce_scatter(piece, pieces),
        group.broadcast(told, group.size - 1),
        group.all_to_all(swapped, rows, counts, counts),
    ]
    for work in reversed(works):
        work.wait()
    results = {"sum": total, "max": largest, "gather": whole, "scatter": piece, "broadcast": told, "swapped": swapped}
    return {name: tensor.flatten().tolist() for name, tensor in results.items()}


def in_both() -> list[dict[str, list[float]]]:
    context = current_context()
    return [collectives(context.tensor), collectives(context.data), collectives(context.tensor)]


def expected(rank: int, size: int) -> dict[str, list[float]]:
    total = size * (size + 1) / 2
    return {
        "sum": [total, total],
        "max": [float(size), -1.0],
        "gather": [entry for one in range(1, size + 1) for entry in (one, 10.0 * one)],
        "scatter": [total * (rank + 1)],
        "broadcast": [float(size)],
        "swapped": [other + 1.0 for other in range(size) for _ in range(2 * ((rank + other) % 3))],
    }


@RUNS
def test_groups_of_a_layout(run: Run) -> None:
    for rank, (tensor, data, again) in enumerate(run(in_both, 6, tensor=3, data=2)):
        assert tensor == again == expected(rank % 3, 3)
        assert data == expected(rank // 3, 2)


def test_one_rank_computes_alone() -> None:
    assert collectives(Alone()) == expected(0, 1)


def start_sum(group: Group) -> Work:
    return group.all_reduce(torch.ones(1))


def start_swap(group: Group) -> Work:
    one_each = [1] * group.size
    return group.all_to_all(torch.empty(group.size), torch.ones(group.size), one_each, one_each)


def die_or_wait(how: str, start: Callable[[Group], Work]) -> tuple[int, float]:
    context = current_context()
    collectives(context.tensor)
    if context.rank == 1:
        time.sleep(0.2)
        if how == "dies":
            os._exit(9)
        context.world.report(Failure(1, "on purpose"))
        return 1, 0.0
    started = time.monotonic()
    try:
        start(context.tensor).wait()
    except LinkError as error:
        first = context.world.report(error)
    assert first.died == 1 if how == "dies" else first == Failure(1, "on purpose")
    return first.rank, time.monotonic() - started


@pytest.mark.some(2)
@pytest.mark.parametrize("tensor", [2, 3])
@pytest.mark.parametrize(
    ("run", "how", "start"),
    [
        (run_threads, "gives up", start_sum),
        (run_processes, "gives up", start_sum),
        (run_processes, "dies", start_sum),
        (run_threads, "gives up", start_swap),
        (run_processes, "dies", start_swap),
    ],
)
def test_a_lost_rank_wakes_the_others(run: Run, how: str, start: Callable[[Group], Work], tensor: int) -> None:
    options: dict[str, Any] = {"may_die": [1]} if how == "dies" else {}
    for rank, result in enumerate(run(die_or_wait, tensor, how, start, tensor=tensor, **options)):
        if rank != 1:
            lost, seconds = result
            assert lost == 1
            assert seconds < 1.5


def collect_again() -> list[dict[str, list[float]]]:
    context = current_context()
    before = in_both()
    context.world.report(Failure(context.rank, "on purpose"))
    context.world.reopen()
    return [*before, *in_both()]


@pytest.mark.exhaustive
@RUNS
def test_groups_start_afresh(run: Run) -> None:
    for rank, results in enumerate(run(collect_again, 4, tensor=2, data=2)):
        for index, result in enumerate(results):
            assert result == expected(rank // 2 if index % 3 == 1 else rank % 2, 2)


def time_out() -> str:
    context = current_context()
    context.world.place.patience = 2.0
    if context.rank == 0:
        try:
            context.tensor.all_reduce(torch.ones(1)).wait()
        except LinkError as error:
            return f"{error.expired} {error}"
    time.sleep(4)
    return ""


@pytest.mark.some(1)
@RUNS
def test_a_wait_ends_when_time_is_up(run: Run) -> None:
    told, _ = run(time_out, 2, tensor=2, timeout=2.0)
    assert told.startswith("True in a collective of ranks [0, 1]")
