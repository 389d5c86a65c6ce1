"""Work: something that ranks do together and that is under way; and what is raised when it cannot end."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """A transfer or a collective under way."""

    def wait(self) -> object:
        """Returns when the tensor is there (or gone). Raises LinkError when the other end is lost or time is up, and
        whatever else is wrong with this rank's own tensor.
        """


class LinkError(Exception):
    """The channel to `peer`, a rank of the world, broke while this rank was `doing` something; `expired` when it gave
    the wait up. What is behind it is found out by telling all ranks of it.
    """

    def __init__(self, peer: int, doing: str = "exchanging tensors", *, expired: bool = False, why: str = "") -> None:
        super().__init__(f"{doing} (rank {peer}): {why or ('time is up' if expired else 'the channel is closed')}")
        self.peer = peer
        self.doing = doing
        self.expired = expired
        self.why = why

    def story(self, rank: int, timeout: float) -> str:
        """What happened to `rank`, this one, whose waits give up after so many seconds."""
        return (
            f"rank {rank} {f'gave up after {timeout:g} s' if self.expired else 'was'} {self.doing} (rank {self.peer})"
        )

    def during(self, doing: str) -> LinkError:
        """The same, with what this rank was doing."""
        return LinkError(self.peer, doing, expired=self.expired, why=self.why)
