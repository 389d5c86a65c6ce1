"""The command that checks a machine with GPUs, on the CPU: its report, and its exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow.schedules import SCHEDULES
from pipeflow.testing import gpu, machine_checks
from pipeflow.testing.models import TiedModel


def test_a_machine_without_gpus_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert capsys.readouterr().out.startswith(
        "torch finds no GPU on this machine; run this command where there are GPUs"
    )


def test_threads_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--threads", "--only", "tied"]) == 0
    report = capsys.readouterr().out
    assert re.search(r"^ok +tied weights +[\d.]+ s +1 x 4 ranks, [\d.]+ ms\n1 of 1 checks passed", report, re.MULTILINE)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_there_are_checks_for_any_number_of_ranks(ranks: int) -> None:
    found = {each.name: each for each in machine_checks.checks(ranks)}
    assert {"1f1b, headers", "tied weights", "a checkpoint"} <= found.keys()
    assert all(ranks % (each.pipeline * each.tensor) == 0 for each in found.values())
    replicas = {name for name, each in found.items() if each.pipeline * each.tensor < ranks}
    assert ("2 replicas" in replicas) == (ranks % 2 == 0)


def test_a_check_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = TiedModel.plain_step

    def twice(self: TiedModel, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, gradients = plain(self, batch)
        return loss, {name: 2 * gradient for name, gradient in gradients.items()}

    monkeypatch.setattr(TiedModel, "plain_step", twice)
    assert gpu.main(["--device", "cpu", "--threads", "--only", "tied"]) == 1
    report = capsys.readouterr().out
    assert re.search(r"^FAILED  tied weights +[\d.]+ s", report, re.MULTILINE)
    assert "        ranks [3]:\n        Traceback" in report
    assert "AssertionError: layers.3.scale deviates by 5.0e-01" in report
    assert report.endswith("\n0 of 1 checks passed\n")


def test_options_that_run_nothing_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--threads", "--only", "tide"]) == 1
    assert capsys.readouterr().out.endswith(
        "\nno check has the text of --only in its name: leave it out to see all names\n"
    )
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--threads", "--ranks", "8"])
    assert "--threads starts 4 threads: leave out --ranks" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_processes_report() -> None:
    command = [sys.executable, "-m", "pipeflow.testing.gpu", "--device", "cpu", "--ranks", "2"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    named = [check.name for check in machine_checks.checks(2)]
    assert [line[8:44].rstrip() for line in done.stdout.splitlines() if line.startswith("ok  ")] == named
    assert f"{len(named)} of {len(named)} checks passed" in done.stdout
    assert {f"{name}, headers" for name in SCHEDULES} | {"2 tensor ranks", "an error on one rank"} < set(named)
