"""One rank with four chunks against a plain accumulation loop over the same model: what the engine itself costs.

On the GPU where there is one, else on the CPU.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.measure import paired
from benchmarks.report import Report

CHUNKS, MICROBATCHES = 4, 8
WIDTH, HEADS, LENGTH, SAMPLES = 256, 4, 128, 4  # samples of a microbatch


def run(rounds: int | None = None) -> Report:
    import torch

    rounds = rounds or 11
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    times = _measure(rounds)
    title = f"one_rank: {CHUNKS} chunks on one rank, {MICROBATCHES} microbatches, {place}, {rounds} rounds"
    report = Report("one_rank", title, ["", "median ms", "x plain loop"])
    report.data = {"seconds": times}
    for name, seconds in times.items():
        report.rows.append(
            [name, f"{1e3 * statistics.median(seconds):.1f}", f"{paired(times, name, 'plain loop'):.3f}"]
        )
    report.notes.append("target: pipeflow at most 1.02 x the plain loop")
    return report


def _measure(rounds: int) -> dict[str, list[float]]:
    """Per contender the seconds of a step, in rounds that alternate them, after two of warm-up."""
    import torch
    from torch import nn
    from torch.nn import functional

    import pipeflow
    from benchmarks.models import Block

    context = pipeflow.launch(pipeline=1)
    stages = nn.ModuleList(Block(WIDTH, HEADS).to(context.device) for _ in range(CHUNKS))
    schedule = pipeflow.make_schedule("interleaved-1f1b", ranks=1, microbatches=MICROBATCHES, chunks=CHUNKS)
    model = pipeflow.Pipeline(stages, schedule, criterion=functional.mse_loss)
    whole = nn.Sequential(*stages)
    inputs, labels = torch.randn(2, SAMPLES * MICROBATCHES, LENGTH, WIDTH, device=context.device)

    def plain_loop() -> None:
        for part, wanted in zip(inputs.split(SAMPLES), labels.split(SAMPLES), strict=True):
            (functional.mse_loss(whole(part), wanted) / MICROBATCHES).backward()

    def pipelined() -> None:
        pipeflow.execute_pipeline(iter([(inputs, labels)]), model)

    times: dict[str, list[float]] = {"plain loop": [], "pipeflow": []}
    for number in range(-2, rounds):
        for name, step in (("plain loop", plain_loop), ("pipeflow", pipelined))[:: 1 if number % 2 else -1]:
            model.zero_grad()
            _finish(context.device)
            start = time.perf_counter()
            step()
            _finish(context.device)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def _finish(device: object) -> None:
    import torch

    if str(device) != "cpu":
        torch.cuda.synchronize()
