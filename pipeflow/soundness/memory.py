"""Memory: where a schedule keeps more activations alive than a rank may. Counted from the order alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeflow.core.action import Kind, actions_of
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.violation import Violation

Cap = float | Sequence[float]


def over_cap(schedule: Schedule, cap: Cap) -> Iterator[Violation]:
    """Per rank that exceeds its cap, one violation, at the first action that does.

    `cap` is in microbatches of a rank's whole share of the model, for all ranks or one per rank, and what is alive is
    counted as `Timeline.peak_activations` counts it: from its F to its B or I, and without backwards one at a time.

    Raises UsageError unless there is a positive cap for every rank.
    """
    counts = [_alive(schedule, rank) for rank in range(len(schedule.rows))]
    share = schedule.placement.chunks_per_rank
    least = [max(count, default=0) / share for count in counts]
    for rank, (count, limit) in enumerate(zip(counts, _caps(cap, least), strict=True)):
        for position, alive in enumerate(count):
            if alive / share > limit * (1 + 1e-9):
                has = f"{schedule.rows[rank][position]} makes it {alive / share:g} microbatches of activations"
                wants = f"at most {limit:g}; the least cap that works here is {least[rank]:g}"
                yield Violation(has, wants, rank, position)
                break


def _alive(schedule: Schedule, rank: int) -> list[int]:
    """Per entry of a row, the most chunk activations that are alive in it."""
    row = schedule.rows[rank]
    if all(action.kind is Kind.F for action in schedule.actions(rank)):
        return [1] * len(row)
    alive, counts = 0, []
    for entry in row:
        most = alive
        for action in actions_of(entry):
            alive += _CHANGES[action.kind]
            most = max(most, alive)
        counts.append(most)
    return counts


_CHANGES = {Kind.F: 1, Kind.B: -1, Kind.I: -1, Kind.W: 0, Kind.R: 0}


def _caps(cap: Cap, least: list[float]) -> list[float]:
    """The cap of every rank."""
    caps = [cap] * len(least) if isinstance(cap, (int, float)) else list(cap)
    if len(caps) != len(least):
        raise UsageError(f"memory_cap is one number, or one for each of {len(least)} ranks; got {len(caps)} of them")
    for rank, limit in enumerate(caps):
        if not limit > 0:
            raise UsageError(
                f"memory_cap must be positive, got {limit} for rank {rank}: this schedule needs {least[rank]:g} there"
            )
    return caps
