"""What a command says while it takes long, and what is too large to be begun."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from pipeflow.planning.cluster import Cluster
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layouts import find_layouts
from pipeflow.planning.transformer import GPT
from pipeflow.schedules.registry import COMPARED
from pipeflow.tools.cli import main, outputs
from pipeflow.tools.cli.outputs import doing
from tests.cli.run import error, out

DEADLINE = 30  # seconds, for a thread to run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(monkeypatch: pytest.MonkeyPatch, err: io.StringIO, wanted: str) -> str:
    """What is said of work that goes on until `wanted` has been said."""
    monkeypatch.setattr(outputs, "AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", err)
    end = time.monotonic() + DEADLINE
    with doing("simulating 1f1b"):
        while wanted not in err.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    return err.getvalue()


def test_progress_is_a_line_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, io.StringIO(), "...") == "simulating 1f1b ...\n"


def test_progress_goes_away_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(monkeypatch, Terminal(), " s")
    assert "simulating 1f1b" in text
    assert text.endswith("\x1b[2K")


@pytest.mark.parametrize("seconds", [None, 1e-6])
def test_a_bar_says_the_time_left(monkeypatch: pytest.MonkeyPatch, seconds: float | None) -> None:
    monkeypatch.setattr(outputs, "AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    end = time.monotonic() + DEADLINE
    with doing("searching", seconds=seconds) as report:
        report(0.5)
        while "left" not in err.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert re.search(r"searching .* \d s, about \d s left", err.getvalue())


def test_a_search_reports_how_far_it_is() -> None:
    shares: list[float] = []
    wanted = Wanted(GPT.named("gpt3-2.7b"), Cluster.of("a100-80gb"), 16, 64, sequence_parallel=False, overlap=False)
    find_layouts(wanted, top=2, progress=shares.append)
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.5 < shares[-1] <= 1


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "AFTER", 60.0)
    assert main(["draw", "1f1b"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["draw {}", "simulate {}", "verify {}", "export {} --csv -", "diff {} gpipe"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "zb-auto", "chimera"])
def test_a_million_ranks_and_microbatches_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    assert error(capsys, *command.format(name).split(), "--ranks", 10**6, "--microbatches", 10**6) == (
        "1,000,000 ranks x 1,000,000 microbatches is too large: stages times microbatches may be at most 1,000,000"
    )


def test_chunks_count_and_so_do_plans_and_comparisons(capsys: pytest.CaptureFixture[str]) -> None:
    many = error(capsys, "draw", "interleaved-1f1b", "--chunks", 10**9)
    assert many.startswith("4 ranks x 8 microbatches x 1,000,000,000 chunks is too large")
    planned = error(capsys, "plan", "tiny", "--pipeline", 10**6, "--microbatches", 10**6)
    assert planned.startswith("1,000,000 ranks x 1,000,000 microbatches is too large")
    unfilled = error(capsys, "plan", "gpt2-small", "--pipeline", 10**5)
    assert unfilled == "12 layers cannot fill 100,000 pipeline ranks: use at most 12"
    search = ("plan", "gpt2-small", "--device", "h100-80gb", "--devices", 8, "--batch", 10**7)
    assert error(capsys, *search).endswith("for a search on 8 devices: at most 2,000 for each, 16,000 in all")
    assert error(capsys, "compare", "--ranks", 10**6, "--microbatches", 10**6).startswith(f"{', '.join(COMPARED)}: ")
    assert "is sound" in out(capsys, "verify", "1f1b", "--ranks", 2, "--microbatches", 300)
