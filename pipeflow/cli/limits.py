"""Limits: schedules that are too large to be made at all, refused before anything is made."""

from __future__ import annotations

from collections.abc import Mapping

from pipeflow.core.errors import UsageError

LARGEST = 10_000_000  # stages times microbatches: takes some gigabytes, and minutes
PER_RANK = ("chunks", "waves")  # options that say how many stages a rank has


def require_size(ranks: int, microbatches: int, options: Mapping[str, object]) -> None:
    """Raises UsageError for more microbatches on all stages than a machine can hold as actions. Numbers that are wrong
    in another way are left to the schedule.
    """
    sizes = {"ranks": ranks, "microbatches": microbatches}
    sizes |= {name: value for name in PER_RANK if isinstance(value := options.get(name), int)}
    size = 1
    for number in sizes.values():
        size *= max(number, 1)
    if size > LARGEST:
        asked = " x ".join(f"{number:,} {name}" for name, number in sizes.items())
        raise UsageError(f"{asked} are too many to be made: together they may be {LARGEST:,}, these are {size:,}")
