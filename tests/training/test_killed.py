"""Runs of which a rank is killed (`kill -9`) and that are started again end with the weights of a run that is not
interrupted, and read every sample of every epoch once. Two stages and two replicas over gloo, dropout, AdamW, two
schedules of the learning rate, evaluations, a checkpoint every three steps.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeflow.testing import run_processes
from pipeflow.testing.ranks import free_port
from tests.training.killed_rank import EPOCHS, REPLICAS, SAMPLES, STAGES, STEPS, Run, arguments, digest, train

ROOT = Path(__file__).parents[2]
RANKS = STAGES * REPLICAS
RENDEZVOUS = ("--master-addr=127.0.0.1 --master-port={port}", "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}")


@cache
def undisturbed(dropout: float) -> list[dict[str, Any]]:
    """What every rank has after a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        return run_processes(train, RANKS, Run(folder, 0, dropout), data=REPLICAS)


def killed_and_continued(
    folder: Path,
    choices: random.Random,
    *,
    dropout: float = 0.1,
    asynchronous: bool = False,
    replicas: int = REPLICAS,
    accumulation: int = 1,
) -> list[dict[str, Any]]:
    """What every rank has at the end, after one was killed at any moment of its steps or between them."""
    expected, victim = undisturbed(dropout), choices.randrange(RANKS)
    step, a_step = choices.randrange(EPOCHS * STEPS - 2), max(each["seconds"] for each in expected) / EPOCHS / STEPS
    after, name = choices.uniform(0.0, a_step), str(folder)
    first = Run(name, 1, dropout, asynchronous=asynchronous, victim=victim, after=after, step=step)
    ended = run_processes(train, RANKS, first, data=REPLICAS, may_die=(victim,))
    assert ended[victim] is None, "the run ended before the kill"
    found = run_processes(train, STAGES * replicas, Run(name, 2, dropout, accumulation, asynchronous), data=replicas)
    resumed = found[0]["resumed"]
    read = {step: samples for step, samples in steps_read(folder, 1).items() if step <= resumed} | steps_read(folder, 2)
    for epoch in range(EPOCHS):
        samples = [sample for step in range(epoch * STEPS, (epoch + 1) * STEPS) for sample in read[step + 1]]
        assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}, {first}"
    return found


def steps_read(folder: Path, life: int) -> dict[int, list[int]]:
    """By step, the samples that all replicas read."""
    found: dict[int, list[int]] = {}
    for file in folder.glob(f"read-{life}-*"):
        for line in file.read_text(encoding="utf-8").splitlines():
            step, samples = json.loads(line)
            found.setdefault(step, []).extend(samples)
    return found


def require_the_same(folder: Path, choices: random.Random, *, asynchronous: bool) -> None:
    """Under the same layout, the bits of the weights and metrics."""
    found = killed_and_continued(folder, choices, asynchronous=asynchronous)
    assert [digest(each) for each in found] == [digest(each) for each in undisturbed(0.1)]


def require_the_same_on_one_replica(folder: Path, choices: random.Random, accumulation: int) -> None:
    """Which takes twice the batch, or accumulates two; no dropout."""
    found = killed_and_continued(folder, choices, dropout=0.0, replicas=1, accumulation=accumulation)
    for mine, its in zip(found, undisturbed(0.0), strict=False):  # the ranks of a replica follow each other
        for name, weight in mine["weights"].items():
            assert abs(weight - its["weights"][name]).max() < 1e-12, name


def require_the_same_under_torchrun(folder: Path, choices: random.Random, rendezvous: str) -> None:
    """A rank is killed at a step within an epoch; torchrun starts all of them again."""
    victim, step = choices.randrange(RANKS), choices.choice([n for n in range(4, EPOCHS * STEPS) if n % STEPS])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
    command += rendezvous.format(port=free_port()).split() + arguments(Run(str(folder), 1, victim=victim, step=step))
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (folder / "killed").exists(), ended.stderr
    assert ended.returncode == 0, ended.stderr
    found = [(folder / f"digest-{rank}").read_text(encoding="utf-8") for rank in range(RANKS)]
    assert found == [digest(each) for each in undisturbed(0.1)]


@pytest.mark.exhaustive
def test_a_rank_is_killed_while_it_saves_beside_training(tmp_path: Path) -> None:
    require_the_same(tmp_path, random.Random(1), asynchronous=True)


@pytest.mark.exhaustive
def test_a_rank_is_killed_and_half_the_replicas_go_on(tmp_path: Path) -> None:
    require_the_same_on_one_replica(tmp_path, random.Random(2), 1)


@pytest.mark.exhaustive
def test_torchrun_starts_all_again(tmp_path: Path) -> None:
    require_the_same_under_torchrun(tmp_path, random.Random(3), RENDEZVOUS[0])


@pytest.mark.drill
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_is_killed_at_any_moment(tmp_path: Path, turn: int, asynchronous: bool) -> None:
    require_the_same(tmp_path, random.Random(turn), asynchronous=asynchronous)


@pytest.mark.drill
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_rank_is_killed_at_any_moment_and_half_the_replicas_go_on(
    tmp_path: Path, turn: int, accumulation: int
) -> None:
    require_the_same_on_one_replica(tmp_path, random.Random(turn), accumulation)


@pytest.mark.drill
@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_torchrun_starts_all_again_at_any_step(tmp_path: Path, turn: int, rendezvous: str) -> None:
    require_the_same_under_torchrun(tmp_path, random.Random(turn), rendezvous)
