"""The command that starts the explorer: the link that it opens, and how it ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit
from urllib.request import urlopen

import pytest

from pipeflow.core.cost import EVEN_COSTS, EVEN_NAMES
from pipeflow.tools.cli import explore
from pipeflow.tools.cli.command import parser
from pipeflow.tools.explore.answers import code
from pipeflow.tools.explore.fields import FIELDS
from tests.cli.run import error, out

DEADLINE = 30.0  # seconds


def fields(*words: str) -> dict[str, str]:
    return explore.fields(parser("explore").parse_args(["explore", *words]))


def test_options_are_fields_of_the_link() -> None:
    assert fields() == {}
    words = "zb-v 1f1b --ranks 8 --microbatches 32 --chunks 3 --transfer 0.1 --forward 2 --reduce 1.5 --overlap 0"
    assert fields(*words.split()) == {
        "schedule": "zb-v,1f1b",
        "ranks": "8",
        "microbatches": "32",
        "chunks": "3",
        "latency": "0.1",
        "forward": "2",
        "reduce": "1.5",
        "overlap": "0",
    }
    words = "gpipe --recompute-stages 0,2-3 --offload-stages all --offload 0.5"
    assert fields(*words.split()) == {
        "schedule": "gpipe",
        "recompute_stages": "0,2,3",
        "offload_stages": "all",
        "offload": "0.5",
    }
    assert fields("zb-auto", "--memory-cap", "4,3,2,1.5")["memory_cap"] == "4,3,2,1.5"


def test_every_cost_of_the_command_is_a_field() -> None:
    assert set(EVEN_NAMES.values()) == set(EVEN_COSTS)
    assert set(EVEN_NAMES) <= set(FIELDS)


@pytest.mark.parametrize(
    "link",
    ["http://127.0.0.1:1/xyz/#schedule=zb-v&ranks=8", "#schedule=zb-v&ranks=8", "page.html#schedule=zb-v&ranks=8"],
)
def test_a_link_from_elsewhere_is_opened(link: str) -> None:
    assert fields("--link", link) == {"schedule": "zb-v", "ranks": "8"}
    assert fields("gpipe", "--link", link, "--microbatches", "4") == {
        "schedule": "gpipe",
        "ranks": "8",
        "microbatches": "4",
    }


def test_a_link_brings_the_readers_own_schedule() -> None:
    rows = "0F0 0B0\n1F0 1B0"
    assert fields("--link", "#schedule=custom&rows=0F0+0B0%0A1F0+1B0") == {"schedule": "custom", "rows": rows}
    assert fields("--link", "#") == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mine.csv", "is not the name of a schedule; open a file by dropping it onto the page"),
        ("zbv", "unknown schedule 'zbv'; did you mean 'zb-v'?"),
        ("1f1b --ranks 1000000", "the page shows at most 256 ranks"),
        ("1f1b --ranks 64 --microbatches 100000", "too large for the page"),
        ("--ranks 0", "ranks must be a whole number of at least 1"),
        ("--link http://127.0.0.1:1/xyz/", "--link needs the address of a page, or its part from # on"),
        ("--link #colour", "like '#schedule=zb-v&ranks=8', got '#colour'"),
        ("--link #made=up", "unknown field 'made'"),
        ("--link #schedule=zb-w", "unknown schedule 'zb-w'"),
        ("--link #a=%ff", "the address of a page"),
        ("--port x", "argument --port: invalid int value: 'x'"),
        ("--port 65536", "port 65536 cannot be used: ports are from 0 to 65535"),
        ("--forward nan", "argument --forward: it must be finite"),
        ("--costs x.json", "unrecognized arguments: --costs"),
        ("--forward-only", "did you mean --forward? (see pipeflow explore --help)"),
    ],
)
def test_what_the_page_cannot_show_is_one_clear_error(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error(capsys, "explore", *words.split())


def test_a_port_in_use_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = error(capsys, "explore", "--port", port)
    assert said == f"port {port} cannot be used: Address already in use; choose another one, or 0 for any"


def test_the_copied_command_and_the_link_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """`pipeflow draw` with the options of a link, and `pipeflow explore` with the options of `pipeflow draw`."""
    given = {"schedule": "zb-auto", "ranks": "4", "microbatches": "6", "memory_cap": "4,3,2,1", "latency": "0.5"}
    words = shlex.split(code(given)["command"])
    assert fields(*words[2:]) == given


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        out(capsys, "explore", "--help")
    help_ = capsys.readouterr().out
    for option in ("--ranks", "--chunks", "--transfer", "--reduce", "--port", "--no-browser", "Ctrl-C"):
        assert option in help_


@contextmanager
def running(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process, and the address that it prints."""
    argv = [sys.executable, "-m", "pipeflow", "explore", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what runs in a shell's background
    try:
        started = subprocess.Popen(argv, text=True, env=os.environ | environment, **pipes)  # type: ignore[call-overload]  # of pipes
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert process.stdout.readline() == "press Ctrl-C to stop\n"
            yield process, url
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> None:
    """Presses Ctrl-C: the command ends with status 0 and says nothing."""
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=DEADLINE) == ("", "")
    assert process.returncode == 0


@pytest.mark.slow
def test_ctrl_c_ends_it_also_while_browsers_are_connected() -> None:
    with running("zb-v", "--ranks", "64", "--microbatches", "512", "--no-browser") as (process, url):
        parts = urlsplit(url)
        assert dict(parse_qsl(parts.fragment))["schedule"] == "zb-v"
        with urlopen(url.partition("--link #")[0], timeout=DEADLINE) as response:
            assert b"<title>pipeflow explore</title>" in response.read()
        with (
            socket.create_connection(("127.0.0.1", parts.port or 0)),
            socket.create_connection(("127.0.0.1", parts.port or 0)) as asking,
        ):
            body = parts.fragment
            head = f"POST {parts.path}plan HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
            asking.sendall(f"{head}{body}".encode())
            interrupted(process)


@pytest.mark.exhaustive
@pytest.mark.skipif(os.name != "posix", reason="the browser of this test is a script")
def test_the_browser_is_opened_at_the_link_and_may_stay_open(tmp_path: Path) -> None:
    """Also a browser that returns only when it is closed."""
    script, opened, stay = (tmp_path / name for name in ("browser", "opened", "stay"))
    stay.touch()
    lines = ["#!/bin/sh", f'printf %s "$1" > {opened}.part', f"mv {opened}.part {opened}", "exec > /dev/null 2>&1"]
    script.write_text("\n".join([*lines, f"while [ -e {stay} ]; do sleep 0.1; done", ""]), encoding="utf-8")
    script.chmod(0o755)
    try:
        with running("gpipe", BROWSER=f"{script} %s") as (process, url):
            end = time.monotonic() + DEADLINE
            while not opened.exists():
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            assert opened.read_text(encoding="utf-8") == url
            with urlopen(url.partition("--link #")[0], timeout=DEADLINE) as response:
                assert response.status == 200
            interrupted(process)
    finally:
        stay.unlink()


@pytest.mark.slow
def test_the_explorer_needs_neither_torch_nor_rich() -> None:
    argv = [
        sys.executable,
        "-c",
        "import sys, pipeflow.tools.explore; print({'torch', 'rich', 'numpy', 'networkx'} & {*sys.modules})",
    ]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "set()\n"
