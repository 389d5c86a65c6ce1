"""Work: something that ranks do together and that is under way; and what is raised when it cannot end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Work(Protocol):
    """A transfer or a collective under way."""

    def wait(self) -> object:
        """Returns when the tensor is there (or gone). Raises LinkError when the other end is lost or time is up, and
        whatever else is wrong with this rank's own tensor.
        """


class Link(Protocol):
    """This rank's end of what connects it to a peer, or to a group."""

    def wait(self, works: Iterable[Work]) -> None:
        """Returns when all of them are done. What it raises, `lost` reads."""

    def lost(self, error: BaseException) -> BaseException:
        """What to raise for an error of a start or of a wait: a LinkError where the channel is broken or time is up,
        else the error itself, which then is about this rank's own tensor.
        """


class Exchange:
    """Work that is started and waited for by itself. Raises what `link` reads in an error."""

    __slots__ = ("_link", "_work")

    def __init__(self, link: Link, start: Callable[..., Work], *arguments: object) -> None:
        self._link = link
        try:
            self._work = start(*arguments)
        except RuntimeError as error:
            raise link.lost(error) from None

    def wait(self) -> None:
        try:
            self._link.wait([self._work])
        except RuntimeError as error:
            raise self._link.lost(error) from None


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
