"""Work: a transfer or a collective under way, and the error raised if it cannot end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Work(Protocol):
    """A transfer or a collective under way."""

    def wait(self) -> object:
        """Returns when the tensor has arrived (or left).

        Raises LinkError if the other end is lost or time is up, and any other error if this rank's own tensor is wrong.
        """


class Connection(Protocol):
    """This rank's end of the connections to a peer or to a group."""

    def wait(self, works: Iterable[Work]) -> None:
        """Returns when all `works` are done. Pass the errors it raises to `lost`."""

    def lost(self, error: BaseException) -> BaseException:
        """The error to raise for an error of a start or a wait. It is a LinkError if the channel is broken or time is
        up. Otherwise it is the error itself, which is then about this rank's own tensor.
        """


class Exchange:
    """A Work that starts at once and is waited for alone. Its errors are passed through `link.lost`."""

    __slots__ = ("_link", "_work")

    def __init__(self, link: Connection, start: Callable[..., Work], *arguments: object) -> None:
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
    """The channel to `peer` broke. Reporting it to all ranks finds out why.

    Attributes:
        peer: rank in the world.
        doing: description of what this rank was doing.
        expired: True if this rank gave up waiting.
        why: the message of the underlying error, if there is one.
    """

    def __init__(self, peer: int, doing: str = "exchanging tensors", *, expired: bool = False, why: str = "") -> None:
        super().__init__(f"{doing} (rank {peer}): {why or ('time is up' if expired else 'the channel is closed')}")
        self.peer = peer
        self.doing = doing
        self.expired = expired
        self.why = why

    def story(self, rank: int, timeout: float) -> str:
        """Describes what happened to `rank`, which is this one, whose waits give up after `timeout` seconds."""
        return (
            f"rank {rank} {f'gave up after {timeout:g} s' if self.expired else 'was'} {self.doing} (rank {self.peer})"
        )

    def during(self, doing: str) -> LinkError:
        """The same error with another description of what this rank was doing."""
        return LinkError(self.peer, doing, expired=self.expired, why=self.why)
