"""Runs the command within the tests' own process."""

from __future__ import annotations

import pytest

from pipeflow.tools.cli import main


def out(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What a command that works prints, beside what it wrote and, on a busy machine, its progress."""
    assert main([str(word) for word in argv]) == 0
    captured = capsys.readouterr()
    assert all(line.startswith("wrote ") or line.endswith(" ...") for line in captured.err.splitlines())
    return captured.out


def error(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a command that cannot work leaves."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pipeflow: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("pipeflow: error: ").rstrip("\n")
