"""Hosts whose own name is 127.0.1.1 to them, as on Debian, find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.covering import some_rows
from tests.parallel.two_hosts import ADDRESSES, NAMES, available, environment, hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not available(), reason="needs root and network namespaces")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("master", "initialized"),
    some_rows(product([ADDRESSES[0], NAMES[0]], [False, True]), [(NAMES[0], False), (ADDRESSES[0], True)]),
)
def test_hosts_whose_names_are_loopback_addresses(tmp_path: Path, master: str, initialized: bool) -> None:
    said = ["initialized"] if initialized else []
    program = [sys.executable, "-m", "tests.parallel.two_hosts", *said]
    with hosts(tmp_path) as on:
        ranks = []
        for rank in range(2):
            link = f"pf{os.getpid()}{'ab'[rank]}" if initialized else None  # torch's own gloo needs to be told
            ranks.append(
                subprocess.Popen(
                    on[rank] + program,
                    env=environment(rank, master, link),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            told = [process.communicate(timeout=90) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for output, errors in told:
        assert output == "all are here\n", errors
