"""Diagnosis: decides which rank is to blame when another has waited too long, or whether to keep waiting. Must not
contain: communication; these are pure functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
        number: of that call, or of the last one, among those that all ranks make together.
        batch: number of its replica, and of the samples of the batch that it reads in that call, once known.
    """

    waits_for: tuple[int, ...] = ()
    patience: float | None = None
    call: str = ""
    inside: float = math.inf
    number: int = 0
    batch: tuple[int, int] | None = None


@dataclass(slots=True, eq=False)
class RankPlace:
    """Where a rank is in the calls that all ranks make together. The rank sets this; any thread may read it.

    Attributes:
        patience: seconds that others wait at most for this rank while it is in such a call. None between such calls:
            then they wait as long as its process lives.
        call: describes its current call, and is empty before it begins. Its string, made when it is needed, appears in
            the error if the ranks' calls do not match. Its attribute `batch`, if it has one, is that of a `Status`.
        suspects: True while this rank waits for others of which some may do something else. Then the ranks' calls are
            compared soon, rather than when the time is up.
        number: of that call, or of the last one.
        begun: when that was, by the monotonic clock.
    """

    patience: float | None = None
    call: object = ""
    suspects: bool = False
    number: int = 0
    begun: float = -math.inf

    def enter(self, number: int) -> None:
        """Records that the rank begins call `number`."""
        self.number, self.begun = number, time.monotonic()

    def status(self, waits_for: tuple[int, ...]) -> Status:
        """The status of the rank, which waits for these ranks."""
        number = None
        while number != self.number:  # the rank may go on to its next call meanwhile
            number, call = self.number, self.call
        batch = getattr(call, "batch", None)
        return Status(waits_for, self.patience, str(call), time.monotonic() - self.begun, number, batch)


def in_wait(blame: Failure, waited: str) -> Failure:
    """The failure, with what a rank has `waited` for. If calls do not match, that says enough."""
    return blame if blame.usage else replace(blame, reason=f"{blame.reason}; {waited}")


def silent(rank: int) -> Failure:
    """The blame for a rank that does not answer."""
    return Failure(rank, "it does not answer: its process is stopped or hangs, or its machine is cut off")


def gone(rank: int) -> Failure:
    """The blame for a rank whose process has ended without a goodbye."""
    return Failure(rank, "its process is gone; restart the job", died=rank)


def left(rank: int) -> Failure:
    """The blame for a rank that has said goodbye while others still need it."""
    return Failure(
        rank, "it has left, as its script ended or it closed its context; restart the job", died=rank, left=True
    )


def diagnose(by: int, seconds: float, statuses: Mapping[int, Status | Failure]) -> Failure | None:
    """The blame for rank `by` having waited `seconds`, found by following the chain of waits; None to keep waiting.

    A rank that waits for none by pipeflow's channels may be in a collective of another library: then only ranks that
    are gone or silent are to blame.

    Args:
        by: the rank that waits, or whose call takes long.
        seconds: how long it has waited.
        statuses: status of every rank; for ranks that are gone or silent, their blame.
    """
    chain = list(_chain(by, statuses))
    for rank in (*chain, *statuses):
        status = statuses[rank]
        if isinstance(status, Failure):
            return status
    if not waits(by, statuses):
        return None
    for rank in chain:
        status = statuses[rank]
        assert isinstance(status, Status)
        if not status.waits_for:
            is_late = status.patience is not None and min(seconds, status.inside) >= status.patience
            return Failure(rank, "it took too long") if is_late else None
    first = statuses[by]
    assert isinstance(first, Status)
    if seconds < (first.patience or 0.0):
        return None
    return mismatch(first.number, statuses) or Failure(
        by, f"it waits for rank {first.waits_for[0]}, which waits too: their calls do not match"
    )


def mismatch(number: int, statuses: Mapping[int, Status | Failure]) -> Failure | None:
    """The blame if ranks that are in call `number` make other calls, or read batches of other sizes in one replica. One
    is enough to know this at once: a call that does not match cannot end.
    """
    inside = {
        rank: status for rank, status in statuses.items() if isinstance(status, Status) and status.number == number
    }
    calls = {rank: status.call for rank, status in inside.items() if status.call}
    if len(set(calls.values())) > 1:
        return _odd(calls, "all ranks must make the same call")
    batches = {rank: status.batch for rank, status in inside.items() if status.batch is not None}
    for replica in {replica for replica, _ in batches.values()}:
        sizes = {rank: f"reads a batch of {size} samples" for rank, (its, size) in batches.items() if its == replica}
        if len(set(sizes.values())) > 1:
            return _odd(sizes, "all ranks of a replica need the same data in the same order")
    return None


def _odd(done: Mapping[int, str], advice: str) -> Failure:
    """The blame for the fewest ranks that do the same; of several equally few, for those of the highest numbers."""
    groups: dict[str, list[int]] = {}
    for rank, what in sorted(done.items()):
        groups.setdefault(what, []).append(rank)
    (odd, [rank, *alike]), *others = sorted(groups.items(), key=lambda group: (len(group[1]), -group[1][0]))
    said = [f"rank {first}{_like(rest)} {what}" for what, (first, *rest) in others]
    return Failure(rank, f"it{_like(alike)} {odd}, but {', '.join(said)}: {advice}", usage=True)


def _like(ranks: Sequence[int]) -> str:
    many = "s" if len(ranks) > 1 else ""
    return f", like rank{many} {', '.join(map(str, ranks))}," if ranks else ""


def waits(rank: int, statuses: Mapping[int, Status | Failure]) -> bool:
    """Returns True if a rank that answers waits for another one by pipeflow's channels."""
    status = statuses[rank]
    return isinstance(status, Status) and bool(status.waits_for)


def is_left_alone(by: int, statuses: Mapping[int, Status | Failure], failed: Failure) -> bool:
    """Returns True if rank `by` waits in an earlier call than the one that `failed`, for a rank that has come to that
    call. It has closed its channels, so the wait does not end.
    """
    others = [statuses[rank] for rank in _chain(by, statuses) if rank != by]
    return failed.number is not None and any(
        isinstance(status, Status) and status.number >= failed.number for status in others
    )


def absent(by: int, seconds: float, statuses: Mapping[int, Status | Failure]) -> Failure | None:
    """The blame for a rank between two calls, for which rank `by` waits in the first call after a failure. Before a
    failure, it is waited for; afterwards the ranks may have gone different ways.
    """
    for rank, status in statuses.items():
        if rank != by and isinstance(status, Status) and status.patience is None:
            return Failure(rank, f"it has not made another call within {seconds:.3g} s after a failure")
    return None


def standstill(by: int, statuses: Mapping[int, Status | Failure]) -> Failure | None:
    """The rank at the end of the chain of waits of rank `by`, and what it does, if nobody is to blame yet. None if the
    chain has no end.
    """
    for rank in _chain(by, statuses):
        status = statuses[rank]
        if isinstance(status, Status) and not status.waits_for:
            if status.patience is None:
                return Failure(rank, "it is between two calls; the others wait as long as its process answers")
            return Failure(rank, f"its call takes long, and may take {status.patience:g} s")
    return None


def _chain(by: int, statuses: Mapping[int, Status | Failure]) -> Iterator[int]:
    """`by`, the ranks it waits for, the ranks these wait for, and so on; each once."""
    seen, upcoming = set(), [by]
    while upcoming:
        rank = upcoming.pop(0)
        if rank not in seen:
            seen.add(rank)
            yield rank
            status = statuses[rank]
            upcoming += status.waits_for if isinstance(status, Status) else ()
