"""The bugs of public reports in `examples/bugs`: one command finds each, and says what docs/bugs.md shows."""

from __future__ import annotations

import shlex
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from pipeflow.tools.cli import main
from tests.guides import ROOT, blocks, commands, guide

PAGE = guide("docs/bugs.md")
SHOWN = {
    Path(shlex.split(command)[2]).stem: (command, said)
    for block in blocks(PAGE, "console")
    for command, said in commands(block)
}
FOUND = {  # where and why each is wrong
    "scaled_at_every_stage": ("the gradient of 1.0.bias (stage 1, rank 1)", "scale"),
    "scaled_in_every_step": ("the gradient of 3.bias (stage 1, rank 1)", "scale"),
    "wiped_between_lengths": ("the gradient of 3.bias (stage 1, rank 1)", "missing_microbatch"),
    "norms_of_groups": ("the norm of the gradients (ranks 0, 1)", "norm"),
}

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")


@cache
def answer(command: str) -> tuple[int, str]:
    """The status and the output of a command line."""
    with redirect_stdout(StringIO()) as said:
        status = main(shlex.split(command)[1:])
    return status, said.getvalue()


@pytest.mark.parametrize("name", SHOWN)
def test_each_is_found_as_the_page_shows(name: str) -> None:
    assert answer(SHOWN[name][0]) == (1, SHOWN[name][1].rstrip("\n") + "\n")


@pytest.mark.parametrize("name", FOUND)
def test_each_is_found_at_its_place_with_its_cause(name: str) -> None:
    place, cause = FOUND[name]
    said = " ".join(answer(SHOWN[name][0])[1].split())
    assert said.startswith(f"The runs differ from step 0 on, and the likely cause is {cause}. ")
    assert f". {place[:1].upper()}{place[1:]} is the first to differ" in said


@pytest.mark.parametrize("name", FOUND)
def test_each_is_alike_once_it_is_mended(name: str) -> None:
    status, said = answer(f"{SHOWN[name][0]} -- --mended")
    assert (status, said.partition(":")[0]) == (0, "The runs are alike")


def test_the_job_of_a_ci_fails_on_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [job] = blocks(PAGE, "yaml")
    [command] = [line.partition("run: ")[2] for line in job.splitlines() if "run: pipeflow" in line]
    script = (ROOT / "examples" / "bugs" / "norms_of_groups.py").read_text(encoding="utf-8")
    for name in ("train.py", "plain.py"):
        (tmp_path / name).write_text(script, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert answer(command)[0] == 1
    assert "<li" in (tmp_path / "gradients.html").read_text(encoding="utf-8")
