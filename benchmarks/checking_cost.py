"""What recording costs: steps of a GPT of 21 million parameters with and without it, in turns, on one thread; and the
peak memory of a process that trains one of 96 million.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.checked import gpt
from benchmarks.report import Report
from pipeflow.checking import record

SIZES = gpt.Sizes(words=8192, width=512, heads=8, length=128, batch=4, layers=4)
LARGE = gpt.Sizes(words=16384, width=768, heads=12, length=32, batch=2, layers=10)
LARGE_COUNT = 96_046_080
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
    bare_peak, recorded_peak = (_alone(recorded) for recorded in (False, True))
    more = (recorded_peak - bare_peak) / (4 * LARGE_COUNT)
    report.data["peaks"] = [bare_peak, recorded_peak]
    report.notes.append(
        f"peak of a process: {bare_peak / 2**30:.2f} GiB, recorded {recorded_peak / 2**30:.2f} GiB: {more:.2f} copies "
        "of the gradients more; target: 1"
    )
    report.notes.append("target: 1.15; a step that is not recorded runs no code of record")
    return report


def _alone(recorded: bool) -> int:
    """The peak in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, recorded).result()


def _peak(recorded: bool) -> int:
    """The most bytes that this process held in two steps of a large model."""
    torch.set_num_threads(1)
    step, model, optimizer = _job(LARGE)
    assert sum(each.numel() for each in model.parameters()) == LARGE_COUNT
    with tempfile.TemporaryDirectory() as folder, record(folder if recorded else None, model, optimizer, samples=False):
        step()
        step()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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


def _job(sizes: gpt.Sizes = SIZES) -> tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer]:
    model = gpt.model(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), gpt.RATE)
    words = torch.randint(sizes.words, (sizes.batch, sizes.length))

    def step() -> None:
        optimizer.zero_grad()
        gpt.mean_loss(model(words), words, float(words.numel())).backward()
        optimizer.step()

    return step, model, optimizer
