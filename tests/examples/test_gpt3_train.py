"""The training script: what it refuses, and that it trains what the model in one piece would."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import gpt3.model
import gpt3.train
from tests.examples.conftest import EXAMPLES, GPT3
from tests.scripts import run_ranks


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--schedule 1f2b", "unknown schedule '1f2b'; did you mean '1f1b'?"),
        ("--ranks 9", "9 stages are too many for --preset tiny, which has 8 layers"),
        ("--schedule interleaved-1f1b --chunks 3", "12 stages are too many for --preset tiny, which has 8 layers"),
        ("--chunks 2", "schedule '1f1b' does not take chunks; its options are extra_warmup, slices"),
        ("--batch 4", "--batch 4 does not fill --microbatches 8"),
        ("--sequence 257", "--sequence must be 2 to 256 for --preset tiny"),
        ("--batch 8 --replicas 2", "--batch 8 does not fill --microbatches 8 of each of 2 replicas"),
        ("--replicas 3", "--batch 16 does not divide into --replicas 3"),
        ("--replicas 0", "--batch 16 does not divide into --replicas 0"),
        ("--tensor 3", "tensor=3 does not divide 4 heads and hidden 128: the nearest that work are 2 and 4"),
        ("--ranks 0", "ranks must be an integer of at least 1, got 0"),
        ("--steps 0", "--steps must be at least 1, not 0"),
        ("--lr nan", "--lr must be positive, not nan"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    started: list[str] = []
    for name in ("prepare", "start_ranks", "run"):
        monkeypatch.setattr(gpt3.train, name, lambda *_, name=name: started.append(name))
    monkeypatch.setattr(sys, "argv", ["train.py", *line.split()])
    with pytest.raises(SystemExit) as stopped:
        gpt3.train.main()
    assert stopped.value.code == f"train.py: {said}"
    assert started == []


def test_other_ranks_leave_the_message_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    asked = "--ranks 2 --tensor 2 --replicas 1"
    for line, rank, code in (
        ("--ranks 2", "0", "train.py: --ranks 2, but 3 processes were started"),
        (asked, "0", f"train.py: {asked} is 4 processes, but 3 processes were started"),
        ("--ranks 2", "1", 1),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *line.split()])
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stopped:
            gpt3.train.main()
        assert stopped.value.code == code


def test_torchrun_says_how_long_the_pipeline_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(sys, "argv", ["train.py", "--tensor", "2", "--replicas", "2"])
    arguments = gpt3.train.read_arguments()
    assert (arguments.ranks, arguments.world) == (2, 8)


@pytest.mark.parametrize("steps", [1, 2, 20, 100])
def test_the_rate_rises_then_falls_to_a_tenth(steps: int) -> None:
    optimizer, rate = gpt3.model.make_optimizer([torch.nn.Parameter(torch.zeros(1))], 0.5, steps)
    rates = []
    for _ in range(steps):
        rates.append(rate.get_last_lr()[0])
        optimizer.step()
        rate.step()
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(0.5)
    assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)
    assert steps < 20 or rates[-1] == pytest.approx(0.05, rel=0.1)


SMALL = ("--batch", "5", "--microbatches", "3", "--sequence", "32", "--steps", "4")


@pytest.mark.exhaustive
def test_one_process_trains_and_draws(cache: Path, text: Path) -> None:
    printed = run_ranks(GPT3 / "train.py", *SMALL, "--ranks", "1", "--data", str(text), "--lr", "0.01", ranks=1)
    assert "step 4/4  loss" in printed
    assert "planned: 1f1b, 1 rank, 3 microbatches" in printed
    assert "measured: 1f1b, 1 rank, 3 microbatches" in printed
    assert "learnt: loss on held-out text" in printed


@pytest.mark.exhaustive
def test_a_pipeline_of_tensor_ranks_and_its_replicas_train_what_one_piece_would(cache: Path, text: Path) -> None:
    layout = ["--ranks", "2", "--tensor", "2", "--replicas", "2"]
    options = ["--check", "--data", str(text), *layout, "--batch", "8", "--microbatches", "2", "--steps", "2"]
    printed = run_ranks(GPT3 / "train.py", *SMALL, *options, ranks=8)
    assert "planned: 1f1b, 2 ranks, 2 microbatches" in printed
    assert "measured: 1f1b, 2 ranks, 2 microbatches" in printed
    assert "largest difference from the model in one piece: loss" in printed


@pytest.mark.slow
def test_several_ranks_train_what_one_piece_would(cache: Path, text: Path) -> None:
    """More than 1e-9 apart is an exit status of 1; uneven microbatches, two stages a rank, a tied word table."""
    options = ["--check", "--ranks", "2", "--schedule", "interleaved-1f1b", "--data", str(text)]
    printed = run_ranks(GPT3 / "train.py", *SMALL, *options, ranks=2)
    assert "largest difference from the model in one piece: loss" in printed


def test_it_starts_as_many_ranks_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(gpt3.train, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(gpt3.train, "start_ranks", started.append)
    monkeypatch.setattr(sys, "argv", ["train.py", "--ranks", "2", "--tensor", "2", "--replicas", "2"])
    gpt3.train.main()
    assert started == [8]


@pytest.mark.exhaustive
def test_a_script_starts_itself_once_per_rank(tmp_path: Path) -> None:
    start, script = tmp_path / "start.py", tmp_path / "script.py"
    start.write_text(
        f"import sys\nimport gpt3.ranks\nsys.argv = [{str(script)!r}, 'x']\ngpt3.ranks.start_ranks(2)\n",
        encoding="utf-8",
    )
    script.write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1])\n", encoding="utf-8"
    )
    printed = run_ranks(start, ranks=1, folder=tmp_path, PYTHONPATH=str(EXAMPLES))
    assert sorted(printed.splitlines()) == ["0 2 x", "1 2 x"]
