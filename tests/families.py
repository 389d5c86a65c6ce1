"""What tests over the registry ask a family of schedules."""

from __future__ import annotations

from functools import cache
from itertools import count

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import make_schedule


@cache
def accepts(name: str, ranks: int) -> bool:
    """Whether the family has schedules for that many ranks."""
    try:
        make_schedule(name, ranks=ranks, microbatches=1)
    except UsageError:
        return False
    return True


def make_near(name: str, *, ranks: int, microbatches: int) -> Schedule:
    """As `make_schedule`, for the next number of ranks that the family accepts."""
    accepted = next(number for number in count(ranks) if accepts(name, number))
    return make_schedule(name, ranks=accepted, microbatches=microbatches)
