"""Limits: schedules that are too large are refused before anything is made."""

from __future__ import annotations

from collections.abc import Mapping

from pipeflow.core.errors import UsageError

LARGEST = 10_000_000  # stages times microbatches: needs some gigabytes of memory, and minutes
PER_RANK = ("chunks", "waves")  # options that set the number of stages per rank


def require_size(ranks: int, microbatches: int, options: Mapping[str, object]) -> None:
    """Raises UsageError if stages times microbatches exceed what a machine can hold as actions. Other wrong numbers are
    left to the schedule.
    """
    sizes = {"ranks": ranks, "microbatches": microbatches}
    sizes |= {name: value for name in PER_RANK if isinstance(value := options.get(name), int)}
    size = 1
    for number in sizes.values():
        size *= max(number, 1)
    if size > LARGEST:
        asked = " x ".join(f"{number:,} {name}" for name, number in sizes.items())
        raise UsageError(f"{asked} is too large: the product may be at most {LARGEST:,}, got {size:,}")
