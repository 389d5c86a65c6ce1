"""What recording costs: steps of a GPT of 21 million parameters with and without it, in turns, on one thread."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.checked import gpt
from benchmarks.report import Report
from pipeflow.checking import record

SIZES = gpt.Sizes(words=8192, width=512, heads=8, length=128, batch=4, layers=4)
COLUMNS = ["run", "step s", "recorded s", "ratio"]


def run(rounds: int | None = None) -> Report:
    torch.set_num_threads(1)
    report = Report("checking_cost", "recording: seconds of a step, median of the ratios of pairs", COLUMNS)
    for name, samples in (("one of several ranks", False), ("plain, with samples", True)):
        bare, recorded = _times(samples, rounds or 9)
        ratio = statistics.median(mine / other for mine, other in zip(recorded, bare, strict=True))
        row = [f"{statistics.median(times):.3f}" for times in (bare, recorded)]
        report.rows.append([name, *row, f"{ratio:.3f}"])
        report.data[name] = {"bare": bare, "recorded": recorded}
    report.notes.append("target: 1.15; a step that is not recorded runs no code of record")
    return report


def _times(samples: bool, rounds: int) -> tuple[list[float], list[float]]:
    (bare_step, _, _), (step, model, optimizer) = _job(), _job()
    times: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory() as folder, record(folder, model, optimizer, samples=samples):
        for turn in range(rounds + 1):
            for which in (0, 1) if turn % 2 else (1, 0):
                start = time.perf_counter()
                (bare_step, step)[which]()
                times[which].append(time.perf_counter() - start)
    return times[0][1:], times[1][1:]


def _job() -> tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer]:
    model = gpt.model(SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), gpt.RATE)
    words = torch.randint(SIZES.words, (SIZES.batch, SIZES.length))

    def step() -> None:
        optimizer.zero_grad()
        gpt.mean_loss(model(words), words, float(words.numel())).backward()
        optimizer.step()

    return step, model, optimizer
