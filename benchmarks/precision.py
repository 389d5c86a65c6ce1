"""Training in 16 bits beside float32: the same GPT on the same text, batch by batch, in one run; how far apart are the
curves of the loss? float32 masters with parameters in 16 bits (NAIVE), and autocast (TORCH). How far rounding alone
takes float32 is shown by float32 in other microbatches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.report import Report

RANKS, BATCH, LENGTH, SMOOTHED = 2, 16, 128, 10
PLANNED = 700  # steps of the demo, from which its learning rate follows


def run(rounds: int | None = None) -> Report:
    """`rounds` are steps here."""
    from pipeflow.testing import run_processes

    steps = rounds or 200
    curves: dict[str, list[float]] = run_processes(train_all, RANKS, steps, deadline=3600)[-1]
    whole = curves["float32"]
    columns = ["", "loss, first step", f"mean of the last {SMOOTHED}", "furthest off, a step", f"mean of {SMOOTHED}"]
    title = f"precision: the example's tiny GPT on {RANKS} ranks, the demo's first {steps} steps"
    report = Report("precision", title, columns, data={"losses": curves})
    for name, losses in curves.items():
        off, off_smoothed = furthest(losses, whole), furthest(smoothed(losses), smoothed(whole))
        ends = f"{losses[0]:.4f}", f"{sum(losses[-SMOOTHED:]) / SMOOTHED:.4f}"
        report.rows.append([name, *ends, f"{off:.2%}", f"{off_smoothed:.2%}"])
    report.notes.append("target: bfloat16 within 2 % of float32 over 200 steps")
    return report


def furthest(losses: list[float], whole: list[float]) -> float:
    """The largest relative distance of two curves."""
    return max(abs(loss - other) / other for loss, other in zip(losses, whole, strict=True))


def smoothed(losses: list[float]) -> list[float]:
    return [sum(losses[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(losses) + 1)]


def train_all(steps: int) -> dict[str, list[float]]:
    """On every rank: the losses of every step, by precision."""
    import torch

    from pipeflow.optim import HalfPrecision

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    return {
        "float32": train(steps, None),
        "float32, 2 microbatches": train(steps, None, microbatches=2),
        "bfloat16 parameters": train(steps, HalfPrecision("parameters", torch.bfloat16)),
        "bfloat16 autocast": train(steps, HalfPrecision("autocast", torch.bfloat16)),
        "float16 parameters": train(steps, HalfPrecision("parameters", torch.float16)),
    }


def train(steps: int, precision: Any, microbatches: int = 8) -> list[float]:
    import torch

    import pipeflow
    from gpt3.build import build_gpt_pipeline, options_of
    from gpt3.data import prepare, wait_for
    from gpt3.model import GPTLMLoss, make_optimizer

    shape, rank = pipeflow.GPT.named("tiny"), pipeflow.current_context().rank
    corpus = (wait_for if rank else prepare)(None, shape.vocabulary)
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=microbatches)
    dtype = torch.float32 if precision is None else precision.parameters
    stages = build_gpt_pipeline(shape.layers, placement=schedule.placement, dtype=dtype, **options_of(shape))
    autocast = None if precision is None else precision.autocast
    model = pipeflow.Pipeline(stages, schedule, criterion=GPTLMLoss(), autocast=autocast)
    inner, rate = make_optimizer(model.parameters(), 4e-3, PLANNED)
    optimizer: Any = inner if precision is None else precision.optimizer(model, inner)
    losses: list[float] = []
    step = 0
    while len(losses) < steps:
        ids = corpus.batch(BATCH, LENGTH, seed=0, step=step)
        optimizer.zero_grad()
        output = pipeflow.execute_pipeline(iter([({"input_ids": ids}, ids)]), model, broadcast_loss=True)
        pipeflow.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if not getattr(optimizer, "step_was_skipped", False):  # else the same batch again, at a smaller loss scale
            rate.step()
            assert output.loss is not None
            losses.append(float(output.loss))
            step += 1
    return losses
