"""All contenders for one schedule, each proved to compute the plain model's gradients before it is timed."""

from __future__ import annotations

from benchmarks import by_hand, pipeflow_side, torch_side
from benchmarks.task import Contender, Task, check
from pipeflow import Placement


def all_of(
    task: Task, rank: int, name: str, chunks: int, *, unknown_shape: bool = False, two_groups: bool = False
) -> dict[str, Contender]:
    """By name: the loop by hand, torch, pipeflow; on demand pipeflow without a given shape, and the loop by hand
    over two groups.
    """
    theirs = torch_side.one_f_one_b(task, rank) if chunks == 1 else torch_side.interleaved(task, rank, chunks)
    made = [by_hand.loop(task, rank, chunks), theirs, pipeflow_side.contender(task, rank, name, chunks=chunks)]
    if two_groups:
        made.append(by_hand.loop(task, rank, chunks, two_groups=True))
    if unknown_shape:
        made.append(pipeflow_side.contender(task, rank, name, chunks=chunks, known_shape=False))
    for contender in made:
        check(task, contender, rank, Placement.looped(task.ranks, chunks))
    return {contender.name: contender for contender in made}
