"""Wire: messages between the coordinator and the ranks. JSON objects, each after its length; who connects proves first
that it knows the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol
from weakref import ref

Message = dict[str, Any]
LONGEST = 1 << 24  # bytes
GREETING = 1 << 10  # bytes, of what is read from somebody who has proved nothing yet


def pack(message: Message) -> bytes:
    """A message as bytes."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(4) + body


class Unpacker:
    """Cuts a stream of bytes into messages. Raises ValueError for what is none, or too long."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with `data`. Raises ValueError for what is no message."""
        self._bytes += data
        while len(self._bytes) >= 4:
            end = 4 + int.from_bytes(self._bytes[:4])
            if end > 4 + self.longest:
                raise ValueError(f"a message of {end - 4} bytes")
            if len(self._bytes) < end:
                return
            message = json.loads(self._bytes[4:end])
            del self._bytes[:end]
            if not isinstance(message, dict):
                raise ValueError("a message that is no object")
            yield message


def prove(secret: bytes, challenge: str, rank: int) -> str:
    """What only who knows the secret can answer."""
    return hmac.new(secret, f"{challenge}/{rank}".encode(), hashlib.sha256).hexdigest()


class Connected(Protocol):
    """Whatever has connections."""

    def sockets(self) -> list[int]:
        """Their descriptors."""


def forget_in_children(connected: Connected) -> None:
    """Closes the connections in processes that fork from this one, such as a loader's workers: they would keep them
    open when this process dies.
    """
    reference = ref(connected)

    def close() -> None:
        if (still := reference()) is not None:
            for descriptor in still.sockets():
                with suppress(OSError):
                    os.close(descriptor)

    os.register_at_fork(after_in_child=close)
