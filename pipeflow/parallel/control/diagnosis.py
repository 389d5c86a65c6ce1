"""Diagnosis: decides which rank is to blame when another has waited too long, or whether to keep waiting. Must not
contain: communication; these are pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeflow.core.errors import Failure

AGAIN = 0.25
"""Share of the timeout after which a wait that outlasts the timeout is diagnosed again. The rank that it waits for may
have begun its call a little later than the wait.
"""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a rank.

    Attributes:
        waits_for: the ranks that it waits for (at least one of them); empty if it does not wait.
        patience: the most seconds that others wait for it, while it is in a call that all ranks make together. None
            between such calls, which may take any time.
        call: description of that call.
        inside: seconds since it began that call.
    """

    waits_for: tuple[int, ...] = ()
    patience: float | None = None
    call: str = ""
    inside: float = math.inf


@dataclass(frozen=True, slots=True)
class Blame:
    """The rank at the end of a chain of waits, and the reason. `died` is as in a `Failure`."""

    rank: int
    reason: str
    died: int | None = None

    def failure(self, waited: str) -> Failure:
        """The failure to report to all ranks; `waited` describes which rank waited for what."""
        return Failure(self.rank, "; ".join(filter(None, (self.reason, waited))), died=self.died)


def silent(rank: int) -> Blame:
    """The blame for a rank that does not answer."""
    return Blame(rank, "it does not answer: its process is stopped or hangs, or its machine is cut off")


def gone(rank: int) -> Blame:
    """The blame for a rank whose process has ended without a goodbye."""
    return Blame(rank, "its process is gone; restart the job", died=rank)


def left(rank: int) -> Blame:
    """The blame for a rank that has said goodbye while others still need it."""
    return Blame(rank, "it has left, as its script ended or it closed its context; restart the job", died=rank)


def diagnose(by: int, seconds: float, statuses: Mapping[int, Status | Blame]) -> Blame | None:
    """The blame for rank `by` having waited `seconds`, found by following the chain of waits; None to keep waiting.

    Args:
        by: the rank that waits.
        seconds: how long it has waited.
        statuses: status of every rank; for ranks that are gone or silent, their blame.
    """
    chain = list(_chain(by, statuses))
    for rank in (*chain, *statuses):
        status = statuses[rank]
        if isinstance(status, Blame):
            return status
    for rank in chain:
        status = statuses[rank]
        assert isinstance(status, Status)
        if not status.waits_for:
            is_late = status.patience is not None and min(seconds, status.inside) >= status.patience
            return Blame(rank, "it took too long") if is_late else None
    first = statuses[by]
    assert isinstance(first, Status)
    if seconds < (first.patience or 0.0):
        return None
    for rank, status in statuses.items():
        if isinstance(status, Status) and status.call and first.call and status.call != first.call:
            what = f"it {first.call}, but rank {rank} {status.call}: all ranks must make the same call"
            return Blame(by, what)
    return Blame(by, f"it waits for rank {first.waits_for[0]}, which waits too: their calls do not match")


def standstill(by: int, statuses: Mapping[int, Status | Blame]) -> Blame | None:
    """The rank at the end of the chain of waits of rank `by`, and what it does, if nobody is to blame yet. None if the
    chain has no end.
    """
    for rank in _chain(by, statuses):
        status = statuses[rank]
        if isinstance(status, Status) and not status.waits_for:
            if status.patience is None:
                return Blame(rank, "it is between two calls; the others wait as long as its process answers")
            return Blame(rank, f"its call takes long, and may take {status.patience:g} s")
    return None


def _chain(by: int, statuses: Mapping[int, Status | Blame]) -> Iterator[int]:
    """`by`, the ranks it waits for, the ranks these wait for, and so on; each once."""
    seen, upcoming = set(), [by]
    while upcoming:
        rank = upcoming.pop(0)
        if rank not in seen:
            seen.add(rank)
            yield rank
            status = statuses[rank]
            upcoming += status.waits_for if isinstance(status, Status) else ()
