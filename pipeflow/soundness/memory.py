"""Memory: where a schedule keeps more activations alive than a rank may. Counted from the order alone."""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.analysis.memory_cap import MemoryCap, cap_per_rank
from pipeflow.core.action import actions_of
from pipeflow.core.liveness import ACTIVATIONS
from pipeflow.core.schedule import Schedule
from pipeflow.core.violation import Violation


def over_cap(schedule: Schedule, cap: MemoryCap) -> Iterator[Violation]:
    """Per rank that exceeds its cap, one violation, at the first action that does.

    `cap` is in microbatches of a rank's whole share of the model, for all ranks or one per rank, and what is alive is
    counted as `Timeline.peak_activations` counts it: from its F to its B or I, and without backwards one at a time.

    Raises UsageError unless there is a positive cap for every rank.
    """
    counts = [_alive(schedule, rank) for rank in range(len(schedule.rows))]
    share = schedule.placement.chunks_per_rank
    least = [max(count, default=0) / share for count in counts]
    for rank, (count, limit) in enumerate(zip(counts, cap_per_rank(cap, least), strict=True)):
        for position, alive in enumerate(count):
            if alive / share > limit * (1 + 1e-9):
                has = f"{schedule.rows[rank][position]} makes it {alive / share:g} microbatches of activations"
                wants = f"at most {limit:g}; the least cap that works here is {least[rank]:g}"
                yield Violation(has, wants, rank, position)
                break


def _alive(schedule: Schedule, rank: int) -> list[int]:
    """Per entry of a row, the most chunk activations that are alive in it."""
    row = schedule.rows[rank]
    if not any(ACTIVATIONS[action.kind] < 0 for action in schedule.actions(rank)):  # nobody keeps any
        return [1] * len(row)
    alive, counts = 0, []
    for entry in row:
        most = alive
        for action in actions_of(entry):
            alive += ACTIVATIONS[action.kind]
            most = max(most, alive)
        counts.append(most)
    return counts
