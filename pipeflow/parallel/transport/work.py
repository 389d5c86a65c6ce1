"""Work: something that ranks do together and that is under way; and what is raised when it cannot end."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Returns when the tensor is there (or gone); raises when the other end is lost or time is up."""


class LinkError(Exception):
    """The channel to `peer`, a rank of the world, broke, or its deadline passed, while this rank was `doing`
    something.
    """

    def __init__(self, peer: int, doing: str, error: BaseException) -> None:
        super().__init__(f"{doing}: {error}")
        self.peer = peer
        self.doing = doing
        self.timed_out = any(words in str(error).lower() for words in ("timed out", "timeout"))
