"""Memory: where a schedule keeps more activations than a rank may. Must not contain: times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeflow.core.action import actions_of
from pipeflow.core.analysis.memory_cap import MemoryCap, cap_per_rank
from pipeflow.core.cost import require_factors
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import Violation
from pipeflow.core.liveness import memory_changes
from pipeflow.core.schedule import Schedule


def over_cap(schedule: Schedule, cap: MemoryCap, factors: Sequence[float] = ()) -> Iterator[Violation]:
    """One violation per rank that exceeds its cap, at the first action that does.

    `cap` is in microbatches of a rank's whole share of the model: one number for all ranks, or one per rank.
    Activations are counted as in `Timeline.peak_activations`: from an F to its B or I, and one at a time in a schedule
    without backwards. Each counts as often as the factor of its microbatch says.

    Raises UsageError unless every rank has a positive cap.
    """
    require_factors(factors, schedule.num_microbatches)
    most = max(
        (action.microbatch for rank in range(len(schedule.rows)) for action in schedule.actions(rank)), default=0
    )
    each = (*factors, *(1.0,) * (most + 1 - len(factors)))  # of microbatches that do not exist, too
    counts = [_alive(schedule, rank, each) for rank in range(len(schedule.rows))]
    share = schedule.placement.chunks_per_rank
    least = [max(count, default=0) / share for count in counts]
    for rank, (count, limit) in enumerate(zip(counts, cap_per_rank(cap, least), strict=True)):
        for position, alive in enumerate(count):
            if alive / share > limit * (1 + 1e-9):
                kept = f"{alive / share:g} microbatches of activations"
                has = f"with {schedule.rows[rank][position]} the rank keeps {kept}"
                wants = f"at most {limit:g}; the least cap that works here is {least[rank]:g}"
                yield Violation(has, wants, rank, position)
                break


def _alive(schedule: Schedule, rank: int, factors: Sequence[float]) -> list[float]:
    """Per entry of a row, the most chunk activations that are kept during it."""
    row, actions = schedule.rows[rank], [*schedule.actions(rank)]
    changes = [
        change.net(Content.SAVED) * factors[action.microbatch]
        for action, change in zip(actions, memory_changes(actions), strict=True)
    ]
    if not any(change < 0 for change in changes):  # no activation is kept for later
        return [max(factors[action.microbatch] for action in actions_of(entry)) for entry in row]
    alive, counts, each = 0.0, list[float](), iter(changes)
    for entry in row:
        most = alive
        for _ in actions_of(entry):
            alive += next(each)
            most = max(most, alive)
        counts.append(most)
    return counts
