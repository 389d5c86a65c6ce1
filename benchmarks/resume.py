"""Runs of which a rank is killed (`kill -9`) and that are started again: do they end with the weights of a run that is
not interrupted, and was every sample of every epoch read once? Two stages and two replicas over gloo, dropout, AdamW,
two schedules of the learning rate, evaluations, a checkpoint every three steps. Minutes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.drills import MODES
from benchmarks.report import Report
from benchmarks.resume_rank import EPOCHS, REPLICAS, SAMPLES, STAGES, STEPS, Run, arguments, digest, train
from pipeflow.testing.ranks import free_port, run_processes

RANKS = STAGES * REPLICAS


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 10
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch tells of every connection that closes
    title = f"resume: {STAGES} stages x {REPLICAS} replicas, {EPOCHS * STEPS} steps, kill -9 of a rank and a new start"
    columns = ["", "jobs", "killed", "steps redone", "same bits", "every sample once", "largest difference"]
    report = Report("resume", title, columns)
    choices = random.Random(0)
    for name, one, times in (
        ("at a random moment", kill_once, rounds),
        ("on half the data ranks", halve_once, max(1, rounds // 2)),
        ("torchrun --max-restarts", restart_once, max(1, rounds // 5)),
    ):
        found = [one(choices, number) for number in range(times)]
        report.rows.append([name, str(times), *summary(found)])
        report.data[name] = found
    report.notes.append("same bits: weights and metrics of all ranks; difference: of a weight, absolute, in float64")
    report.notes.append("on half the data ranks: a replica takes twice the batch, or accumulates two; no dropout")
    return report


def summary(found: list[dict[str, Any]]) -> list[str]:
    redone = sorted(each["redone"] for each in found if each["redone"] is not None)
    same = [each["same"] for each in found if each["same"] is not None]
    differences = [each["difference"] for each in found if each["difference"] is not None]
    once = [each["once"] for each in found if each["once"] is not None]
    return [
        str(sum(each["killed"] for each in found)),
        f"{redone[0]} to {redone[-1]}" if redone else "",
        str(sum(same)) if same else "",
        f"{sum(once)} of {len(once)}" if once else "",
        f"{max(differences):.1e}" if differences else "",
    ]


_UNDISTURBED: dict[float, list[dict[str, Any]]] = {}  # by dropout


def undisturbed(dropout: float) -> list[dict[str, Any]]:
    """What every rank has after a run that nothing happens to."""
    if dropout not in _UNDISTURBED:
        with tempfile.TemporaryDirectory() as folder:
            _UNDISTURBED[dropout] = run_processes(train, RANKS, Run(folder, 0, dropout), data=REPLICAS)
    return _UNDISTURBED[dropout]


def kill_once(choices: random.Random, number: int) -> dict[str, Any]:
    """A rank is killed at any moment of its steps and what lies between them; every other job saves beside it."""
    return killed_and_continued(choices, dropout=0.1, asynchronous=number % 2 == 1)


def halve_once(choices: random.Random, number: int) -> dict[str, Any]:
    """As well, and what is left of the run is done by one replica."""
    return killed_and_continued(choices, dropout=0.0, replicas=REPLICAS // 2, accumulation=1 + number % 2)


def killed_and_continued(
    choices: random.Random,
    *,
    dropout: float,
    asynchronous: bool = False,
    replicas: int = REPLICAS,
    accumulation: int = 1,
) -> dict[str, Any]:
    expected, victim = undisturbed(dropout), choices.randrange(RANKS)
    step, a_step = choices.randrange(EPOCHS * STEPS - 2), max(each["seconds"] for each in expected) / EPOCHS / STEPS
    after = choices.uniform(0.0, a_step)
    with tempfile.TemporaryDirectory() as folder:
        first = Run(folder, 1, dropout, asynchronous=asynchronous, victim=victim, after=after, step=step)
        ended = run_processes(train, RANKS, first, data=REPLICAS, may_die=(victim,))
        second = Run(folder, 2, dropout, accumulation, asynchronous)
        found = run_processes(train, STAGES * replicas, second, data=replicas)
        resumed = found[0]["resumed"]
        before, later = steps_read(Path(folder), 1), steps_read(Path(folder), 2)
    read = {step: samples for step, samples in before.items() if step <= resumed} | later
    same = [digest(each) for each in found] == [digest(each) for each in expected] if replicas == REPLICAS else None
    return {
        "victim": victim,
        "step": step,
        "after": after,
        "killed": ended[victim] is None,
        "reached": max(before, default=0),
        "resumed": resumed,
        "redone": max(before, default=0) - resumed,
        "same": same,
        "once": all(
            sorted(sample for step in range(epoch * STEPS, (epoch + 1) * STEPS) for sample in read[step + 1])
            == list(range(SAMPLES))
            for epoch in range(EPOCHS)
        ),
        "difference": max(
            float(abs(weight - its["weights"][name]).max())
            for mine, its in zip(found, expected, strict=False)  # the ranks of a replica follow each other
            for name, weight in mine["weights"].items()
        ),
    }


def steps_read(folder: Path, life: int) -> dict[int, list[int]]:
    """By step, the samples that all replicas read."""
    found: dict[int, list[int]] = {}
    for file in folder.glob(f"read-{life}-*"):
        for line in file.read_text().splitlines():
            step, samples = json.loads(line)
            found.setdefault(step, []).extend(samples)
    return found


def restart_once(choices: random.Random, number: int) -> dict[str, Any]:
    """A rank is killed at a step within an epoch; torchrun starts all of them again."""
    victim, step = choices.randrange(RANKS), choices.choice([n for n in range(4, EPOCHS * STEPS) if n % STEPS])
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), [digest(each) for each in undisturbed(0.1)]
        mode = MODES[number % len(MODES)].format(port=free_port()).split()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
        script = arguments(Run(name, 1, victim=victim, step=step))
        subprocess.run([*command, *mode, *script], capture_output=True, timeout=300, check=False)
        files = [folder / f"digest-{rank}" for rank in range(RANKS)]
        same = all(file.exists() for file in files) and [file.read_text() for file in files] == expected
        was_killed = (folder / "killed").exists()
    return {
        "victim": victim,
        "step": step,
        "killed": was_killed,
        "redone": None,
        "same": same,
        "once": None,
        "difference": None,
    }
