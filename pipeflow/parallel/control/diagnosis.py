"""Diagnosis: when a rank has waited too long, who is to blame, or whether to wait on. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeflow.core.errors import Failure


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank does.

    Attributes:
        waits_for: the ranks one of which it waits for; empty when it waits for none.
        patience: seconds that others wait for it at most, while it makes a call that all ranks make together; None
            when it is between such calls, and may take as long as it likes.
        call: what it was asked to do there, in words.
        inside: seconds since it began that call.
    """

    waits_for: tuple[int, ...] = ()
    patience: float | None = None
    call: str = ""
    inside: float = math.inf


@dataclass(frozen=True, slots=True)
class Blame:
    """The rank for which all others wait in the end, and why it is that one. `died` as in a Failure."""

    rank: int
    reason: str
    died: int | None = None

    def failure(self, waited: str) -> Failure:
        """What to tell all ranks; `waited` says who waited for what."""
        return Failure(self.rank, "; ".join(filter(None, (self.reason, waited))), died=self.died)


def silent(rank: int) -> Blame:
    """Of a rank that does not answer."""
    return Blame(rank, "it does not answer: its process is stopped or hangs, or its machine is cut off")


def gone(rank: int) -> Blame:
    """Of a rank whose process has ended without a word."""
    return Blame(rank, "its process is gone; restart the job", died=rank)


def left(rank: int) -> Blame:
    """Of a rank that has said goodbye, though others still need it."""
    return Blame(rank, "it has left, as its script ended or it closed its context; restart the job", died=rank)


def diagnose(by: int, seconds: float, statuses: Mapping[int, Status | Blame]) -> Blame | None:
    """Who is to blame that rank `by` has waited so many seconds: follows who waits for whom. None to wait on.

    Args:
        statuses: of all ranks; for those that are gone or do not answer, what they are blamed for.
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
            what = f"it {first.call}, but rank {rank} {status.call}: all ranks make the same call"
            return Blame(by, what)
    return Blame(by, f"it waits for rank {first.waits_for[0]}, which waits too: their calls do not match")


def _chain(by: int, statuses: Mapping[int, Status | Blame]) -> Iterator[int]:
    """`by`, the ranks that it waits for, those that they wait for, and so on; each once."""
    seen, upcoming = set(), [by]
    while upcoming:
        rank = upcoming.pop(0)
        if rank not in seen:
            seen.add(rank)
            yield rank
            status = statuses[rank]
            upcoming += status.waits_for if isinstance(status, Status) else ()
