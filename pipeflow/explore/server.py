"""Server: the explorer on this machine. It accepts connections, and bounds how many there are and how long they may be
silent. Must not contain: what a request may ask (`handler`).
"""

from __future__ import annotations

import gc
import secrets
import sys
from contextlib import suppress
from gzip import compress
from socket import SHUT_RDWR, socket
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Semaphore
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.explore.handler import ADDRESS, Handler, report
from pipeflow.explore.page_files import files

MOST_CONNECTIONS = 64
PATIENCE = 30.0
RARELY = 200_000, 20, 20  # how often Python looks for cycles, as `gc.set_threshold` takes it
AT_ONCE = 4  # answers that are computed at once; others wait for their turn


class Server(ThreadingMixIn, TCPServer):
    """A server of the explorer. `serve_forever` serves, `server_close` frees the port.

    Strangers may connect, too. So if there are too many connections, the one that has waited longest for a request, or
    for the rest of it, is closed.

    Args:
        port: the port; 0: any that is free.
        patience: seconds within which a request must arrive, and an answer be taken.

    Attributes:
        token: what the path of every request begins with, made anew for each server.
        files: the files that it serves, by name: their types and contents.
        zipped: their contents as gzip.
        turns: held while an answer is computed.

    Raises UsageError for a port that cannot be had.
    """

    daemon_threads = True
    allow_reuse_address = True  # a server that has just ended leaves its port at once
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, port: int = 0, *, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.token = secrets.token_urlsafe(16)
        self.files = files()
        self.zipped = {name: compress(content) for name, (_, content) in self.files.items()}
        self.turns = Semaphore(AT_ONCE)
        self._waiting: dict[socket, None] = {}  # connections without a whole request; the longest waiting one first
        self._open: set[socket] = set()
        self._lock = Lock()
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}; choose another one, or 0 for any"
            ) from None
        except OverflowError:
            raise UsageError(f"port {port} cannot be used: ports are from 0 to 65535") from None
        self.server_port: int = self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page; a link adds the fields of a state after a `#`."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serves until `shutdown`. Meanwhile Python looks for cycles rarely: schedules and timelines are millions of
        objects without any, and looking takes a third of the time of a large answer.
        """
        often = gc.get_threshold()
        gc.set_threshold(*RARELY)
        try:
            super().serve_forever(poll_interval)
        finally:
            gc.set_threshold(*often)

    def wait(self, connection: socket) -> None:
        """Says that a connection waits for a request."""
        with self._lock:
            if connection in self._open:
                self._waiting[connection] = None

    def work(self, connection: socket) -> None:
        """Says that the whole request of a connection is there, and that it may be answered."""
        with self._lock:
            self._waiting.pop(connection, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, if there are not too many; see the class."""
        with self._lock:
            crowded = len(self._open) >= MOST_CONNECTIONS
            oldest = next(iter(self._waiting), None) if crowded else None
            if oldest is not None:
                del self._waiting[oldest]
                self._open.discard(oldest)
            if not crowded or oldest is not None:
                self._open.add(request)
        if oldest is not None:
            _end(oldest)
        if request in self._open:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection, which then counts as neither open nor waiting."""
        with self._lock:
            self._open.discard(request)
            self._waiting.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports in one line what went wrong while a request was answered, unless the browser just went away."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            report("a connection", error)


def _end(connection: socket) -> None:
    """Wakes the thread that reads from a connection."""
    with suppress(OSError):  # it may have just ended by itself
        connection.shutdown(SHUT_RDWR)
