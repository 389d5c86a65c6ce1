"""Server: the explorer on this machine. It bounds how many connections there are and how long they may be silent. Only
requests to its own name, from its own page and with its token are answered. Files are served from a table that is made
at the start, so no request can name another one.
"""

from __future__ import annotations

import gc
import json
import re
import secrets
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from email.message import Message
from gzip import compress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files as resources
from io import BufferedReader
from math import inf
from socket import SHUT_RD, SHUT_RDWR, SHUT_WR, SocketIO, socket
from string import Template
from threading import Lock, Semaphore
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl

from pipeflow.core.errors import UsageError
from pipeflow.draw.page.glossary import glossary_list
from pipeflow.draw.page.timeline_page import as_script_text, file, variables
from pipeflow.tools.explore.answers import ANSWERS
from pipeflow.tools.explore.fields import ALL
from pipeflow.tools.explore.tour import STEPS

ADDRESS = "127.0.0.1"
LARGEST = 4_000_000  # bytes of a request's body
LONGEST = 8_192  # bytes of a request's first line
MOST_FIELDS = 200
MESSAGE = 400  # characters of a message
LINGER = 2.0  # seconds that a refused client may go on sending
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


KINDS = {"js": "text/javascript", "css": "text/css"}
DESCRIBED = tuple(each._asdict() for each in ALL)
FOLDERS = ("pipeflow.draw", "pipeflow.tools.explore")  # whose folder `page` has modules and style sheets


def page_files() -> dict[str, tuple[str, bytes]]:
    """The files of the page: per name its type and its content. The page itself has an empty name."""
    found = {"": ("text/html", document().encode())}
    for folder in FOLDERS:
        for each in resources(folder).joinpath("page").iterdir():
            kind = each.name.rpartition(".")[2]
            if kind in KINDS:
                found[each.name] = KINDS[kind], each.read_bytes()
    red = variables().replace("--accent", "--fault")  # explore.css has another accent
    found["page.css"] = KINDS["css"], (red + file("page.css")).encode()
    return found


def document(fields: Iterable[Mapping[str, Any]] = DESCRIBED) -> str:
    """The page itself, with controls for `fields`."""
    text = resources("pipeflow.tools.explore").joinpath("page", "explore.html").read_text(encoding="utf-8")
    return Template(text).substitute(
        bar=file("bar.html"),
        glossary=glossary_list(),
        fields=as_script_text([*fields]),
        tour=as_script_text([each.as_json() for each in STEPS]),
    )


class RequestError(Exception):
    """A request that is not answered.

    Args:
        status: the status of the response.
        why: what is wrong, for its reader.
    """

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Input(BufferedReader):
    """Reads from a connection, and knows whether a line was asked for when nothing more came."""

    ended = False

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line, as the base reads it."""
        line = super().readline(size)
        self.ended = not line
        return line


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    rfile: Input
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of an answer to a request that cannot be read
    disable_nagle_algorithm = True  # without it, an answer waits 40 ms for the browser's acknowledgement of its head

    def setup(self) -> None:
        """Makes the streams of the connection."""
        super().setup()
        self.rfile.close()
        self.rfile = Input(SocketIO(self.connection, "r"))
        self._refused = False

    def finish(self) -> None:
        """Closes the streams. Waits a moment for a refused client to end, since a connection that is closed while the
        other side still sends takes the refusal with it.
        """
        super().finish()
        if self._refused:
            with suppress(OSError):
                self.connection.shutdown(SHUT_WR)
                self.connection.settimeout(None)
                self.server.wait(self.connection, LINGER)
                while self.connection.recv(1 << 16):
                    pass

    def handle_one_request(self) -> None:
        """Answers or refuses the next request of the connection."""
        self.command, self.requestline, self.request_version = "", "", self.protocol_version
        self.headers = Message()
        self.close_connection = True
        self.connection.settimeout(None)  # the server ends what takes too long
        self.server.wait(self.connection, self.server.patience)
        try:
            self.raw_requestline = self.rfile.readline(LONGEST + 1)
            if self.raw_requestline and self._has_head():
                self._answer()
        except RequestError as error:
            self._refuse(error.status, str(error))

    def _has_head(self) -> bool:
        """Reads the head of the request. False: it was refused."""
        line = self.raw_requestline
        if len(line) > LONGEST:
            raise RequestError(HTTPStatus.REQUEST_URI_TOO_LONG, f"the address may have at most {LONGEST:,} bytes")
        words = line.split()
        if not line.endswith(b"\n"):
            raise self._cut_off()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            raise RequestError(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1")
        read = self.parse_request()
        if read and self.rfile.ended:
            raise self._cut_off()
        return read

    def _cut_off(self) -> RequestError:
        if self.server.is_late(self.connection):
            return RequestError(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")
        return RequestError(HTTPStatus.BAD_REQUEST, "the request was cut off")

    def handle_expect_100(self) -> bool:
        """Waits with the consent to a body until the request was checked."""
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses a request whose head cannot be read."""
        self._refuse(HTTPStatus(code), message or explain or HTTPStatus(code).phrase)

    def _answer(self) -> None:
        """Answers a request whose head was read. Raises RequestError."""
        name = self._name()
        if self.command == "GET":
            if name not in self.server.files:
                raise RequestError(HTTPStatus.NOT_FOUND, "there is no such file")
            self.server.work(self.connection)
            kind, content = self.server.files[name]
            if "gzip" in re.split(r"[,;\s]+", self.headers.get("Accept-Encoding", "")):
                self._reply(HTTPStatus.OK, kind, self.server.zipped[name], "gzip")
            else:
                self._reply(HTTPStatus.OK, kind, content)
        elif self.command == "POST":
            if name not in ANSWERS:
                raise RequestError(HTTPStatus.NOT_FOUND, "there is no such question")
            fields = self._fields()
            self.server.work(self.connection)
            self._reply(HTTPStatus.OK, "application/json", self._computed(name, fields))
        else:
            raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, "this server answers GET and POST only")

    def _name(self) -> str:
        """The part of the path behind the token. Raises RequestError for a request from elsewhere."""
        hosts = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        given: list[str] = self.headers.get_all("Host", [])
        origin = self.headers.get("Origin")
        if len(given) != 1 or given[0] not in hosts:
            raise RequestError(HTTPStatus.FORBIDDEN, "this server answers to its own address only")
        if origin is not None and origin != f"http://{given[0]}":
            raise RequestError(HTTPStatus.FORBIDDEN, "this server answers to its own page only")
        path = self.requestline.split()[1].partition("?")[0]
        first, token, name = [*path.split("/", 2), "", ""][:3]
        if first or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            why = "the address lacks the token of this server: open the address that pipeflow explore printed last"
            raise RequestError(HTTPStatus.FORBIDDEN, why)
        if self.headers.get("Transfer-Encoding") is not None:
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "a request must say how long it is, and come in one piece")
        if self.command == "GET" and self.headers.get("Content-Length", "0") != "0":
            raise RequestError(HTTPStatus.BAD_REQUEST, "a GET request has no body")
        return name

    def _fields(self) -> dict[str, str]:
        """The fields in the body of the request, as in a form. Raises RequestError."""
        lengths = self.headers.get_all("Content-Length", [])
        length = lengths[0] if len(lengths) == 1 else ""
        if not (length.isascii() and length.isdigit()):
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "the request does not say how long it is")
        if len(length) > 12 or int(length) > LARGEST:
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have at most {LARGEST:,} bytes")
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise self._cut_off()
        if body.count(b"&") >= MOST_FIELDS:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"a request may have at most {MOST_FIELDS} fields")
        try:
            return dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), errors="strict"))
        except ValueError:
            raise RequestError(HTTPStatus.BAD_REQUEST, "the request is not a form") from None

    def _computed(self, name: str, fields: dict[str, str]) -> bytes:
        """The answer to a question. Raises RequestError for one that is wrong, and for an answer that fails."""
        try:
            with self.server.turns:
                return json.dumps(ANSWERS[name](fields), separators=(",", ":"), allow_nan=False).encode()
        except UsageError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, shorten(str(error))) from None
        except Exception as error:
            report(f"the answer to {name!r}", error)
            why = "this is an error of pipeflow, not of yours; the terminal says where"
            raise RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, why) from None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answers with an error, and closes the connection, since the body may not have been read."""
        self.close_connection = self._refused = True
        if self.command == "POST":
            self._reply(status, "application/json", json.dumps({"error": why}).encode())
        else:
            self._reply(status, "text/plain", f"{why}\n".encode())

    def _reply(self, status: HTTPStatus, kind: str, content: bytes, encoding: str = "") -> None:
        self.connection.settimeout(self.server.patience)
        self.server.wait(self.connection, self.server.patience)
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content)), **HEADERS}
        if encoding:
            headers["Content-Encoding"] = encoding
        if self.close_connection:
            headers["Connection"] = "close"
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, POST"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        """The name that responses carry."""
        return "pipeflow"

    def log_message(self, format: str, *args: Any) -> None:  # the base's name
        """Prints nothing: the terminal shows the address alone."""


def shorten(text: str) -> str:
    """A text without its middle, if it is too long for a message."""
    return text if len(text) <= MESSAGE else f"{text[: MESSAGE // 2]} ... {text[-MESSAGE // 2 :]}"


def report(what: str, error: BaseException) -> None:
    """Says in one line on standard error that something failed which should not."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
    text = " ".join(shorten(str(error)).split())
    sys.stderr.write(f"pipeflow explore: {what} failed: {type(error).__name__}: {text}{where}\n")
    sys.stderr.flush()


MOST_CONNECTIONS = 64
PATIENCE = 30.0
RARELY = 200_000, 20, 20  # how often Python looks for cycles, as `gc.set_threshold` takes it
AT_ONCE = 4  # answers that are computed at once; others wait for their turn


class Server(ThreadingHTTPServer):
    """A server of the explorer. `serve_forever` serves, `server_close` frees the port.

    Strangers may connect, too. So if there are too many connections, the one that has waited longest for its client is
    closed: for a request, for the rest of it, or until an answer is read.

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

    request_queue_size = MOST_CONNECTIONS

    def __init__(self, port: int = 0, *, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.token = secrets.token_urlsafe(16)
        self.files = page_files()
        self.zipped = {name: compress(content) for name, (_, content) in self.files.items()}
        self.turns = Semaphore(AT_ONCE)
        self._open: dict[
            socket, float | None
        ] = {}  # when the client is late; None: it waits. The longest wait is first
        self._lock = Lock()
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}; choose another one, or 0 for any"
            ) from None
        except OverflowError:
            raise UsageError(f"port {port} cannot be used: ports are from 0 to 65535") from None

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

    def wait(self, connection: socket, patience: float) -> None:
        """Says that a connection waits for its client: for a request, or until an answer is read."""
        with self._lock:
            if connection in self._open:
                del self._open[connection]
                self._open[connection] = monotonic() + patience

    def work(self, connection: socket) -> None:
        """Says that the whole request of a connection is there, and that it may be answered."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = None

    def is_late(self, connection: socket) -> bool:
        """Whether the client has not sent in time what the connection waits for."""
        return (self._open.get(connection) or inf) <= monotonic()

    def service_actions(self) -> None:
        """Ends the requests that are late: their threads read nothing more."""
        with self._lock:
            for connection in filter(self.is_late, self._open):
                _end(connection, SHUT_RD)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, if there are not too many; see the class."""
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next((each for each, late in self._open.items() if late is not None), None)
                if oldest is not None:
                    del self._open[oldest]
                    _end(oldest, SHUT_RDWR)
            has_room = len(self._open) < MOST_CONNECTIONS
            if has_room:
                self._open[request] = monotonic() + self.patience
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection, which then counts no more."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports in one line what went wrong while a request was answered, unless the browser just went away."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            report("a connection", error)


def _end(connection: socket, direction: int) -> None:
    """Wakes the thread that reads from a connection."""
    with suppress(OSError):  # it may have just ended by itself
        connection.shutdown(direction)
