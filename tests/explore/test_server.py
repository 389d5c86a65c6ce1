"""What strangers may send to the server. After each case it answers a good request, and the terminal shows nothing."""

from __future__ import annotations

import gc
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlencode

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.tools.explore.answers import ANSWERS
from pipeflow.tools.explore.server import LARGEST, MOST_CONNECTIONS, Server
from tests.explore.explorer import serving

DEADLINE = 20.0  # seconds


@pytest.fixture(autouse=True)
def _lives(server: Server, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert answered(server)
    assert capfd.readouterr() == ("", "")


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE)


def received(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def sent(server: Server, request: bytes, *, end: bool = False) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of the answer; with `end`, nothing more is sent."""
    with connect(server) as connection:
        connection.sendall(request)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return parsed(received(connection))


def parsed(response: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(lines) == len(headers)
    assert not any(name.lower().startswith("access-control") for name in headers)
    assert "Traceback" not in response.decode("latin-1")
    return int(first.split()[1]), headers, body


def request(
    server: Server,
    method: str = "GET",
    name: str = "",
    body: bytes | None = None,
    path: str | None = None,
    **headers: Any,
) -> bytes:
    """A request, which is good if nothing but its name and its body is given. A header that is None is left out."""
    lines = {"Host": f"127.0.0.1:{server.server_port}", "Connection": "close"}
    lines |= {} if body is None else {"Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = f"{method} {f'/{server.token}/{name}' if path is None else path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{head}\r\n".encode("latin-1") + (body or b"")


def question(server: Server, **fields: object) -> bytes:
    return request(server, "POST", "plan", urlencode(fields).encode())


def answered(server: Server) -> bool:
    """Whether a good request is answered."""
    status, _, body = sent(server, question(server, ranks=2, microbatches=2))
    return status == 200 and json.loads(body)["schedules"] == ["1f1b"]


def refused(server: Server, asked: bytes, *, end: bool = False) -> tuple[int, str]:
    """The status and the message of a refusal, which also closes the connection."""
    status, headers, body = sent(server, asked, end=end)
    assert status >= 400
    assert headers["Connection"] == "close"
    assert headers["Content-Length"] == str(len(body))
    if headers["Content-Type"].startswith("application/json"):
        return status, json.loads(body)["error"]
    assert headers["Content-Type"].startswith("text/plain")
    return status, body.decode()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", "", None, "[::1]:80"])
def test_a_foreign_host_is_refused(server: Server, host: str | None) -> None:
    for method, name in (("GET", ""), ("POST", "plan")):
        assert refused(server, request(server, method, name, b"", Host=host))[0] == 403


def test_a_name_that_was_bound_again_to_this_address_is_refused(server: Server) -> None:
    host = f"evil.example:{server.server_port}"
    assert refused(server, request(server, Host=host)) == (403, "this server answers to its own address only\n")
    both = request(server).replace(b"\r\nConnection", f"\r\nHost: {host}\r\nConnection".encode())
    assert refused(server, both)[0] == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_origin_gets_nothing(server: Server, origin: str) -> None:
    assert refused(server, request(server, "POST", "plan", b"ranks=2", Origin=origin))[0] == 403
    assert refused(server, request(server, "POST", "plan", b"ranks=2", path="/plan", Origin=origin))[0] == 403
    asked = request(server, "OPTIONS", "plan", Origin=origin, Access_Control_Request_Method="POST")
    assert refused(server, asked)[0] == 403


def test_the_own_page_is_answered(server: Server) -> None:
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{server.server_port}"
        status, headers, _ = sent(server, request(server, Host=host, Origin=f"http://{host}"))
        assert status == 200
        assert "form-action 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["/", "/plan", "/wrong/plan", "//plan", "/%2e%2e/plan", "/\xe4\xff/plan", "*", "plan"])
def test_a_request_without_the_token_is_refused(server: Server, path: str) -> None:
    assert refused(server, request(server, path=path))[0] == 403
    status, message = refused(server, request(server, "POST", path=path, body=b""))
    assert (status, "open the address that pipeflow explore printed last" in message) == (403, True)


@pytest.mark.parametrize(
    "path",
    [
        *("../explore.py", "..", "%2e%2e/%2e%2e/etc/passwd", "../../../../etc/passwd", "..\\..\\x", "/etc/passwd"),
        *("page.css/", "./page.css", "page.css%00", "page.css\x00", "/page.css", "page/page.css", "PAGE.CSS"),
        *("explore.html", "__init__.py", "page.css/../page.css", "~", "%", "%zz", "a" * 5000, "plan"),
    ],
)
def test_a_path_cannot_leave_the_table_of_files(server: Server, path: str) -> None:
    assert refused(server, request(server, name=path)) == (404, "there is no such file\n")
    assert refused(server, request(server, "POST", path + ".", b"")) == (404, "there is no such question")


def test_an_absolute_address_is_no_path(server: Server) -> None:
    for path in (server.url, f"http://evil.example/{server.token}/", f"//{server.token}/", "http://[::1/"):
        assert refused(server, request(server, path=path))[0] == 403


@pytest.mark.parametrize("length", [None, "", "x", "-1", "+1", "1.0", "1e3", "0x10", "\xb2", "1 1", "1, 1"])
def test_a_body_without_a_length_is_refused(server: Server, length: str | None) -> None:
    assert refused(server, request(server, "POST", "plan", b"", Content_Length=length))[0] == 411


def test_a_body_with_two_lengths_is_refused(server: Server) -> None:
    asked = request(server, "POST", "plan", b"ranks=2").replace(b"\r\n\r\n", b"\r\nContent-Length: 70\r\n\r\n")
    assert refused(server, asked)[0] == 411


@pytest.mark.parametrize("length", [str(LARGEST + 1), "9" * 12, "9" * 5000])
def test_a_large_body_is_refused_before_it_is_read(server: Server, length: str) -> None:
    status, message = refused(server, request(server, "POST", "plan", b"", Content_Length=length))
    assert (status, message) == (413, "a request may have at most 4,000,000 bytes")
    asked = request(server, "POST", "plan", b"", Content_Length=length, Expect="100-continue")
    assert refused(server, asked)[0] == 413  # and not first 100


def test_a_client_that_sends_a_large_body_anyway_reads_the_refusal(server: Server) -> None:
    assert refused(server, request(server, "POST", "plan", b"a" * (LARGEST + 1)))[0] == 413


def test_chunks_are_refused(server: Server) -> None:
    asked = request(server, "POST", "plan", Transfer_Encoding="chunked") + b"7\r\nranks=2\r\n0\r\n\r\n"
    assert refused(server, asked)[0] == 411
    both = request(server, "POST", "plan", b"0\r\n\r\nGET /", Transfer_Encoding="chunked")
    assert refused(server, both)[0] == 411


def test_a_body_of_a_get_is_refused(server: Server) -> None:
    assert refused(server, request(server, "GET", body=b"GET / HTTP/1.1\r\n\r\n")) == (
        400,
        "a GET request has no body\n",
    )


def test_a_client_that_waits_for_consent_gets_it(server: Server) -> None:
    body = b"ranks=2"
    asked = request(server, "POST", "plan", body, Expect="100-continue")
    with connect(server) as connection:
        connection.sendall(asked.removesuffix(body))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert parsed(received(connection))[0] == 200


@pytest.mark.parametrize(
    "method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "GET\x00", "__init__"]
)
def test_other_methods_are_refused(server: Server, method: str) -> None:
    status, headers, body = sent(server, request(server, method))
    assert (status, headers["Allow"], headers["Connection"]) == (405, "GET, POST", "close")
    assert (body == b"") == (method == "HEAD")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (b"GET /\r\n\r\n", 400),  # HTTP/0.9
        (b"GET\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x00\xff\x16\x03\x01\x02\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", 400),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.x\r\n\r\n", 400),
        (b"GET / HTTP/1.1.1\r\n\r\n", 400),
        (b"GET / / HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 1000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\n: \r\n\r\n", 403),
    ],
)
def test_what_is_no_request_is_refused(server: Server, asked: bytes, status: int) -> None:
    assert refused(server, asked)[0] == status


def test_http_1_0_is_answered_and_its_connection_closed(server: Server) -> None:
    old = request(server, name="page.css").replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Connection: close\r\n", b"")
    assert sent(server, old)[0] == 200
    assert refused(server, b"GET / HTTP/1.0\r\n\r\n")[0] == 403


@pytest.mark.parametrize(
    "body",
    [
        *(b"ranks", b"=", b"&", b"ranks=2&&", b"\xff=1", b"ranks=%ff", b"%zz=1", b"ranks=%", b"a=1;b=2", b"\x00"),
        *(
            b"{}",
            b"[1]",
            b"ranks=2&ranks=x",
            b"+=+",
            b"%00=1",
            b"ranks=%00",
            b"a" * 100_000 + b"=1",
            b"ranks=" + b"9" * 100_000,
        ),
        *(
            b"&".join(b"a%d=1" % number for number in range(5000)),
            b"&" * 100_000,
            b"ranks=%f0%9f%98%80",
            b"ranks=%ed%a0%80",
        ),
        *(b"factors=" + b"1," * 1_000_000, b"schedule=" + b"1f1b," * 100_000, b"placement=" + b"9." * 40_000 + b"9"),
        *(b"placement=" + b"9" * 20_000, b"schedule=custom&rows=0F0&placement=" + b"9" * 4000, b"schedule=\r\n\r\n"),
        *(
            b"memory_cap=" + b"1," * 40_000 + b"1&schedule=zb-auto",
            b"ranks=1e400",
            b"forward=1e309",
            b"forward=" + b"1" * 90_000,
        ),
    ],
)
def test_a_malformed_form_is_refused(server: Server, body: bytes) -> None:
    status, message = refused(server, request(server, "POST", "plan", body))
    assert status == 400
    assert 0 < len(message) < 500


@pytest.mark.parametrize(
    "rows",
    [
        *("x", ",", "\n", "0F0\n\n1F0", "0F0;", "\x00", "0F", "F0", "-1F0", "0F-1", "9" * 30 + "F0", "0F" + "9" * 5000),
        *(
            "0F0\n" * 10**5,
            "0F0,10000000F0",
            "0F10000000",
            '"0F0',
            "(0F0",
            "(0F0;1F0)OVERLAP_F_B",
            "0Q0",
        ),
        *("0R", "0REDUCE_GRAD", "\ud7ff", "0F0," + "a" * 10**6, "0F\u0660"),
    ],
)
def test_a_malformed_table_is_refused(server: Server, rows: str) -> None:
    status, message = refused(server, question(server, schedule="custom", rows=rows))
    assert status == 400
    assert 0 < len(message) < 1000


def test_a_request_that_is_cut_off_is_refused(server: Server) -> None:
    whole = question(server, ranks=2)
    for length in range(1, len(whole), 7):
        status, message = refused(server, whole[:length], end=True)
        assert (status, message.strip()) in [(400, "the request was cut off"), (400, "this is not a request of HTTP/1")]


def test_clients_that_connect_and_leave_do_no_harm(server: Server) -> None:
    whole = question(server, ranks=16, microbatches=64)
    for length in (0, 1, 20, len(whole) - 1, len(whole)):
        connect(server).close()
        with connect(server) as connection:
            connection.sendall(whole[:length])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # resets the connection


def test_requests_in_one_piece_are_answered_in_order(server: Server) -> None:
    kept = [request(server, name=name, Connection=None) for name in ("page.css", "main.js")]
    with connect(server) as connection:
        connection.sendall(b"".join(kept) + question(server, ranks=2) + request(server))
        response = received(connection)
    assert response.count(b"HTTP/1.1 200 OK\r\n") == 3  # the third closes the connection
    assert response.index(server.files["page.css"][1]) < response.index(server.files["main.js"][1])
    assert json.loads(response.rpartition(b"\r\n\r\n")[2])["schedules"] == ["1f1b"]


def test_what_follows_a_refusal_is_not_answered(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(request(server, Host="evil.example", Connection=None) + request(server))
        assert received(connection).count(b"HTTP/1.1") == 1


@pytest.fixture
def hasty() -> Iterator[Server]:
    """A server with little patience."""
    with serving(patience=0.2) as server:
        yield server


@pytest.mark.some(3)
@pytest.mark.parametrize("part", [0, 1, 30, 100, -1])
def test_a_client_that_never_finishes_is_told_so(hasty: Server, part: int) -> None:
    status, message = refused(hasty, question(hasty, ranks=2)[:part]) if part else (408, "in time")
    assert status == 408
    assert "in time" in message
    with connect(hasty) as connection:
        assert received(connection) == b""
    assert answered(hasty)


def test_a_client_that_sends_byte_by_byte_has_no_more_time_than_others(hasty: Server) -> None:
    with connect(hasty) as connection:
        for byte in question(hasty, ranks=2)[:-1]:
            connection.sendall(bytes([byte]))
            time.sleep(0.01)
            connection.setblocking(False)
            try:
                response = connection.recv(1 << 16)
                break
            except BlockingIOError:
                connection.settimeout(DEADLINE)
        assert parsed(response)[0] == 408


def test_many_silent_clients_leave_room_for_others(server: Server) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(3 * MOST_CONNECTIONS)]
        for number, connection in enumerate(idle[-MOST_CONNECTIONS:]):
            connection.sendall(question(server, ranks=2)[: 10 * number])
        for _ in range(10):
            assert answered(server)
        assert received(idle[0]) == b""  # the oldest ones were closed
        others = [each for each in threading.enumerate() if "process_request_thread" in each.name]
        assert len(others) <= 2 * MOST_CONNECTIONS


def test_a_client_that_does_not_read_blocks_nobody(server: Server) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(connect(server))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall(question(server, schedule="zb-v", ranks=16, microbatches=64))
        assert answered(server)


def test_many_clients_that_do_not_read_leave_room_for_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server.files, "large", ("text/plain", bytes(1 << 24)))
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS + 6):
            connection = stack.enter_context(connect(server))
            connection.sendall(request(server, "GET", "large"))
            assert connection.recv(1)  # the answer has begun
        assert answered(server)


def test_a_short_answer_does_not_wait_for_long_ones(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()

    def long(fields: object) -> dict[str, Any]:
        begun.set()
        assert release.wait(DEADLINE)
        return {}

    monkeypatch.setitem(ANSWERS, "long", long)
    with connect(server) as connection:
        connection.sendall(request(server, "POST", "long", b""))
        assert begun.wait(DEADLINE)
        assert answered(server)
        release.set()
        assert parsed(received(connection))[0] == 200


def test_cycles_are_looked_for_rarely_while_it_serves() -> None:
    before = gc.get_threshold()  # another server may have set it
    gc.set_threshold(700, 10, 10)
    try:
        with serving() as server:
            assert answered(server)
            assert gc.get_threshold() > (100_000, 10, 10)
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("value", [RuntimeError("one\ntwo"), RecursionError(), MemoryError(), float("nan"), object()])
def test_an_answer_that_fails_is_one_line_in_the_terminal(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    def wrong(fields: object) -> dict[str, Any]:
        if isinstance(value, Exception):
            raise value
        return {"value": value}

    monkeypatch.setitem(ANSWERS, "wrong", wrong)
    status, message = refused(server, request(server, "POST", "wrong", b""))
    assert (status, message) == (500, "this is an error of pipeflow, not of yours; the terminal says where")
    assert answered(server)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("pipeflow explore: the answer to 'wrong' failed: ")
    assert err.count("\n") == 1


def test_two_servers_cannot_have_one_port(server: Server) -> None:
    with pytest.raises(UsageError, match=rf"port {server.server_port} cannot be used: Address already in use; choose"):
        Server(server.server_port)
    for port in (-1, 65_536, 10**30):
        with pytest.raises(UsageError, match="ports are from 0 to 65535"):
            Server(port)


def test_only_this_machine_reaches_the_server(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_the_page_is_small_as_a_browser_loads_it(server: Server) -> None:
    loaded = 0
    for name, (_, content) in server.files.items():
        status, headers, body = sent(server, request(server, name=name, Accept_Encoding="gzip, deflate, br"))
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert gzip.decompress(body) == content
        loaded += len(body)
    assert len(server.files) > 20
    assert loaded < 100_000


def test_who_reads_no_gzip_gets_none(server: Server) -> None:
    for encoding in (None, "", "br", "gzipped"):
        _, headers, body = sent(server, request(server, name="page.css", Accept_Encoding=encoding))
        assert "Content-Encoding" not in headers
        assert body == server.files["page.css"][1]
