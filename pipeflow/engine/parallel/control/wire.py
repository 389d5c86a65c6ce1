"""Wire: messages between the coordinator and the ranks. Each is a JSON object after its length in bytes. Whoever
connects must first prove that it knows the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakMethod

Message = dict[str, Any]
LONGEST = 1 << 24  # bytes
GREETING = 1 << 10  # bytes: the longest message of a connection that has not proved yet to be a rank


def pack(message: Message) -> bytes:
    """The message as bytes: its length in 4 bytes, then its JSON."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(4) + body


class Unpacker:
    """Splits a stream of bytes into messages of at most `longest` bytes each."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that `data` completes. Raises ValueError if the bytes are no message, or one that is too
        long.
        """
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
    """The answer to a challenge; computing it requires the secret."""
    return hmac.new(secret, f"{challenge}/{rank}".encode(), hashlib.sha256).hexdigest()


def forget_in_children(sockets: Callable[[], list[int]]) -> None:
    """Closes the file descriptors that a method returns in processes that are forked from this one, such as workers of
    a data loader: they would keep the connections open after this process dies.
    """
    reference = WeakMethod(sockets)

    def close() -> None:
        if (still := reference()) is not None:
            for descriptor in still():
                with suppress(OSError):
                    os.close(descriptor)

    os.register_at_fork(after_in_child=close)
