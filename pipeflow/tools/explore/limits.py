"""Limits: what one request may cost. An answer within them takes some seconds at most, and its memory stays bounded.
Questions that somebody waits for go before those that take long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Condition
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.schedules import make_schedule, options_of

LARGEST = 65_536  # stages times microbatches, over all schedules of a request
SEARCH = 4  # how many times as long a schedule takes that is searched for, or offloads
MOST_STAGES = 4_096
MOST_RANKS = 256  # tables and drawings have a row per rank
MOST_CELLS = 65_536  # of a table
LONGEST = 100_000  # characters of any other field
PER_RANK = ("chunks", "waves")  # options that set the number of stages per rank


Families = Sequence[tuple[str, Mapping[str, Any]]]  # names of the registry, each with its options


def require_size(families: Families, ranks: int, microbatches: int, largest: int = LARGEST) -> None:
    """Raises UsageError if named schedules of this size would take too long while somebody waits."""
    require_ranks(ranks)
    if any(ranks * _weight(name, options) > MOST_STAGES for name, options in families):
        raise UsageError(
            f"so many stages are too large for the page: {ranks:,} ranks may have {MOST_STAGES:,} together"
        )
    size = sum(ranks * microbatches * _weight(name, options) for name, options in families)
    if size > largest:
        asked = f"{ranks:,} ranks x {microbatches:,} microbatches"
        many = f" for {len(families)} schedules together" if len(families) > 1 else ""
        planned = any(_planned(*family) for family in families)
        raise UsageError(
            f"{asked} is too large for the page: stages times microbatches may be at most {largest:,}{many}"
            f"{f'; a search or an offload counts {SEARCH} times' if planned else ''}"
        )


def require_ranks(ranks: int) -> None:
    """Raises UsageError for more ranks than the page shows."""
    if ranks > MOST_RANKS:
        raise UsageError(f"the page shows at most {MOST_RANKS} ranks, got {ranks:,}")


def require_table(rows: str) -> None:
    """Raises UsageError if a table has too many lines or cells."""
    if rows.strip().count("\n") >= MOST_RANKS:
        raise UsageError(f"the page shows at most {MOST_RANKS} ranks; the table has more lines")
    cells = sum(map(rows.count, ",; \t\n"))
    if cells > MOST_CELLS:
        raise UsageError(f"the table is too large for the page: at most {MOST_CELLS:,} cells, got {cells:,}")


def require_length(name: str, text: str) -> None:
    """Raises UsageError if the text of a field is too long."""
    if name not in ("rows", "files") and len(text) > LONGEST:
        raise UsageError(f"{name} may have at most {LONGEST:,} characters, got {len(text):,}")


def _weight(name: str, options: Mapping[str, Any]) -> int:
    """The cost of a schedule per rank and microbatch: its stages per rank; more for one that is planned."""
    weight = _stages(name, None)
    for option in set(PER_RANK) & set(options_of(name)) & set(options):
        weight = _stages(name, option) * max(int(options[option]), 1)
    return weight * (SEARCH if _planned(name, options) else 1)


def _planned(name: str, options: Mapping[str, Any]) -> bool:
    """Whether it is made for costs."""
    return "cost" in options_of(name) or "offload_stages" in options


@cache
def _stages(name: str, option: str | None) -> int:
    """The stages per rank of a schedule, by default or with an option that is 1."""
    options = {} if option is None else {option: 1}
    return int(make_schedule(name, ranks=2, microbatches=1, **options).placement.chunks_per_rank)


LONGEST_WAIT = 2.0  # seconds


class Turns:
    """Lets threads go first. Threads of one process share the processor, so what runs beside a question delays it."""

    def __init__(self) -> None:
        self._first = 0
        self._changed = Condition()

    @contextmanager
    def first(self) -> Iterator[None]:
        """While this is open, whoever waits waits."""
        with self._changed:
            self._first += 1
        try:
            yield
        finally:
            with self._changed:
                self._first -= 1
                self._changed.notify_all()

    @property
    def free(self) -> bool:
        """Whether nobody goes first."""
        return not self._first

    def wait(self) -> None:
        """Returns when nobody goes first, or after some time, so that it is never left out."""
        with self._changed:
            self._changed.wait_for(lambda: self.free, LONGEST_WAIT)


TURNS = Turns()
"""The turns of the questions of a page."""
