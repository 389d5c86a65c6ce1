"""Server: the explorer on this machine. It serves the page and its modules, and answers what the page asks.

Only requests from this machine, to its own name and with the token of its address, are answered. Files are served from
a table that is made at the start, so no request can name another one.
"""

from __future__ import annotations

import json
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pipeflow.core.errors import UsageError
from pipeflow.explore.answers.table import ANSWERS
from pipeflow.explore.document import files

ADDRESS = "127.0.0.1"
LARGEST = 4_000_000  # bytes of a request's body
MOST_FIELDS = 200
PATIENCE = 30  # seconds that a connection may be silent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server(ThreadingHTTPServer):
    """A server of the explorer. `serve_forever` serves, `server_close` frees the port.

    Args:
        port: the port; 0: any that is free.

    Attributes:
        token: what the path of every request begins with, made anew for each server.

    Raises UsageError for a port that cannot be had.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(16)
        self.files = files()
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(f"port {port} cannot be used: {error}; choose another one, or 0 for any") from None

    @property
    def url(self) -> str:
        """The address of the page; a link adds the fields of a state after a `#`."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports what went wrong while a request was answered, unless the browser just went away."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection of the page."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    disable_nagle_algorithm = True  # without it, an answer waits 40 ms for the browser's acknowledgement of its head

    def do_GET(self) -> None:  # the base calls it by this name
        """Serves the page or one of its files."""
        name = self._path()
        if name is None:
            return
        if name not in self.server.files:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such file")
            return
        self._reply(HTTPStatus.OK, *self.server.files[name])

    def do_POST(self) -> None:  # the base calls it by this name
        """Answers a question of the page, whose fields are in the body as in a form."""
        name = self._path()
        if name is None:
            return
        if name not in ANSWERS:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such question")
            return
        body = self._body()
        if body is None:
            return
        try:
            fields = dict(
                parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=MOST_FIELDS)
            )
            answer = ANSWERS[name](fields)
        except UsageError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "the request is not a form")
        else:
            self._reply(HTTPStatus.OK, "application/json", json.dumps(answer, separators=(",", ":")).encode())

    def _path(self) -> str | None:
        """The part of the path behind the token. None: the request was refused."""
        hosts = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        path = urlsplit(self.path).path.removeprefix("/")
        token, _, name = path.partition("/")
        if self.headers.get("Host") not in hosts:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers to its own address only")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the address lacks the token that pipeflow explore printed")
        else:
            return name
        return None

    def _body(self) -> bytes | None:
        """The body of the request. None: it was refused."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request does not say how long it is")
        elif len(length) > 12 or int(length) > LARGEST:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have at most {LARGEST:,} bytes")
        else:
            return self.rfile.read(int(length))
        return None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answers with an error, and closes the connection, since the body may not have been read."""
        self.close_connection = True
        self._reply(status, "application/json", json.dumps({"error": why}).encode())

    def _reply(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        """The name that responses carry."""
        return "pipeflow"

    def log_message(self, format: str, *args: Any) -> None:  # the base's name
        """Prints nothing: the terminal shows the address alone."""
