"""Events: what was recorded on one rank, and how values of files are read, which may hold anything where their formats
have something else. Must not contain: formats of files, and what events mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LONGEST = 2.0**63  # of a time as a number: what is longer, infinite or no number is none


def seconds(value: object, unit: float) -> float | None:
    """A time in seconds, given in units of so many seconds; None if it is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LONGEST < value < LONGEST:
        return None
    return value * unit


def count(value: object) -> int | None:
    """A number that counts something or identifies it; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text(value: object) -> str:
    """A text; "" if it is none."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """An object; an empty one if it is none."""
    return value if isinstance(value, dict) else {}


def objects(holder: object, key: str) -> list[dict[str, Any]]:
    """The objects in a list of an object."""
    found = mapping(holder).get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


EXCHANGES = re.compile(r"(?:void )?(?:[nr]ccl|[\w:]*(?:nvshmem|rocshmem|\b(?:intra|inter)node(?:_ll)?::))")


def is_exchange(name: str) -> bool:
    """Whether a kernel of this name exchanges tensors between ranks: those of NCCL, RCCL, NVSHMEM, rocSHMEM and DeepEP,
    which are in namespaces "intranode", "internode" and "internode_ll".
    """
    return EXCHANGES.match(name) is not None


class Event(NamedTuple):
    """Something that ran for a while.

    Attributes:
        name: its name.
        start, end: seconds on the clock of its machine.
        number: autograd's sequence number of an operator, or of the operator whose backward a node is; else None.
    """

    name: str
    start: float
    end: float
    number: int | None = None


class Exchange(NamedTuple):
    """What a device runs to exchange tensors between ranks.

    Attributes:
        event: when it ran, and its name.
        launched: when the host launched it; the same as its start where nothing says it.
        called: the collective as the host called it, such as "_allgather_base"; "" if nothing says it.
        group: the ranks that take part, as text, or the name of their group; "" if nothing says them.
    """

    event: Event
    launched: float
    called: str = ""
    group: str = ""


@dataclass
class RankEvents:
    """The events of one rank.

    Attributes:
        source: the file that they were read from.
        rank: the rank; None if the file does not say it.
        ranks: number of ranks of the job; None if the file does not say it.
        host: name of the machine; "" if the file does not say it.
        pipeline: the ranks of its pipeline, in order; empty if the file does not say them.
        group: the ranks of its group of processes, as text, if the file says that it has only one; else "".
        ranges: annotations, such as "PP:0F3".
        operators: operators of forwards on the host.
        backwards: nodes of autograd's graph on the host.
        sends, receives: calls on the host that send to another rank, or receive from one.
        collectives: such calls for several ranks, as sums.
        kernels: computations of a device, each with the time at which the host launched it.
        copies: those of them that copy or fill memory.
        exchanges: what a device runs to exchange tensors with other ranks.
        started: what calls on the host start to exchange tensors, as "nccl:all_reduce" or "gloo:all_reduce".
        work: all operators on the host but those of communication, also those that have no backward.
        annotations: annotations that are no operators, as far as the file tells them apart.
        calls: calls on the host that launch something on a device or wait for one, if they take long.
        launches: the number of all these calls.
        devices: the numbers of the devices.
        is_cut_off: whether the file ends before its end.
        timeless: the number of events that were left out, since they have no time, or end before they start.
    """

    source: str
    rank: int | None = None
    ranks: int | None = None
    host: str = ""
    pipeline: tuple[int, ...] = ()
    group: str = ""
    ranges: list[Event] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)
    backwards: list[Event] = field(default_factory=list)
    sends: list[Event] = field(default_factory=list)
    receives: list[Event] = field(default_factory=list)
    collectives: list[Event] = field(default_factory=list)
    kernels: list[tuple[float, Event]] = field(default_factory=list)
    copies: list[tuple[float, Event]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    started: list[Event] = field(default_factory=list)
    work: list[Event] = field(default_factory=list)
    annotations: list[Event] = field(default_factory=list)
    calls: list[Event] = field(default_factory=list)
    launches: int = 0
    devices: set[int | None] = field(default_factory=set)
    is_cut_off: bool = False
    timeless: int = 0

    @property
    def transfers(self) -> list[Event]:
        """The calls that send and receive."""
        return [*self.sends, *self.receives]
