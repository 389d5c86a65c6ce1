"""The same training under many layouts: the example's GPT on the same text, batch by batch, by plain torch in one
process and by pipelines, tensor ranks, replicas and 16 bits. How far apart are the curves of the loss? How far rounding
alone takes them is shown by one process that divides its batches into other microbatches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Report

BATCH, LENGTH, STEPS = 8, 64, 2000
SMOOTHED = 50  # steps of which a mean is taken
SHOWN = (100, 500, 1000, 2000)  # steps before which it is told


class Layout(NamedTuple):
    """How a job trains; with one rank and no schedule, by plain torch."""

    schedule: str | None = "1f1b"
    ranks: int = 2
    tensor: int = 1
    data: int = 1
    mode: str | None = None  # of HalfPrecision, in bfloat16
    microbatches: int = 8


ONE = "one process, plain torch"
LAYOUTS = {
    ONE: Layout(None, ranks=1),
    "1f1b on 2 ranks": Layout(),
    "zb-v on 2 ranks": Layout("zb-v"),
    "2 tensor ranks": Layout(tensor=2),
    "2 replicas with Zero": Layout(data=2),
    "one process, 2 microbatches": Layout(None, ranks=1, microbatches=2),
    "1f1b, bfloat16 parameters": Layout(mode="parameters"),
    "1f1b, bfloat16 autocast": Layout(mode="autocast"),
}


def run(rounds: int | None = None) -> Report:
    """`rounds` are steps here."""
    from pipeflow.testing import run_processes

    steps = rounds or STEPS
    curves: dict[str, list[float]] = {}
    for name, layout in LAYOUTS.items():
        ranks = run_processes(train, layout.ranks, layout, steps, tensor=layout.tensor, data=layout.data, deadline=3600)
        curves[name] = ranks[-1]
    means = {name: smoothed(losses) for name, losses in curves.items()}
    ends = [step for step in SHOWN if SMOOTHED <= step <= steps] or [steps]
    columns = ["", "first step", *(f"to step {end:,}" for end in ends), "furthest off", "first step that differs"]
    title = f"convergence: the example's tiny GPT, {steps:,} steps of {BATCH} x {LENGTH} tokens of real text"
    report = Report("convergence", title, columns, data={"losses": curves})
    for name, losses in curves.items():
        told = [f"{losses[0]:.4f}", *(f"{means[name][end - SMOOTHED]:.4f}" for end in ends)]
        pairs = zip(losses, curves[ONE], strict=True)
        other = next((step for step, pair in enumerate(pairs, 1) if len({*pair}) > 1), 0)
        report.rows.append([name, *told, f"{furthest(means[name], means[ONE]):.2%}", f"{other}" if other else "none"])
    report.notes.append(f"losses: of the first step, and means of the last {SMOOTHED}; furthest off: of such a mean")
    report.notes.append("target: all within 1 %, as far as rounding alone takes one process")
    return report


def furthest(losses: list[float], whole: list[float]) -> float:
    """The largest relative distance of two curves."""
    return max((abs(loss - other) / other for loss, other in zip(losses, whole, strict=True)), default=0.0)


def smoothed(losses: list[float]) -> list[float]:
    return [sum(losses[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(losses) + 1)]


def train(layout: Layout, steps: int) -> list[float]:
    """On every rank: the loss of every step."""
    import torch

    import pipeflow

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from gpt3.data import prepare, wait_for

    shape, context = pipeflow.GPT.named("tiny"), pipeflow.current_context()
    corpus = (wait_for if context.rank else prepare)(None, shape.vocabulary)
    batches = [corpus.batch(BATCH, LENGTH, seed=0, step=step) for step in range(steps)]
    step_of = (_plain if layout.schedule is None else _pipeline)(shape, layout, steps)
    torch.manual_seed(0)
    return [step_of(ids.tensor_split(context.data_size)[context.data_rank]) for ids in batches]


def _plain(shape: Any, layout: Layout, steps: int) -> Any:
    """A step of plain torch, which accumulates the gradients of microbatches; it returns the loss."""
    import torch

    from gpt3.build import build_stage, options_of
    from gpt3.model import GPTLMLoss, make_optimizer

    model = build_stage(0, shape.layers, shape.layers, first=True, last=True, **options_of(shape))
    criterion, (optimizer, rate) = GPTLMLoss(), make_optimizer(model.parameters(), 4e-3, steps)

    def step(ids: torch.Tensor) -> float:
        optimizer.zero_grad()
        losses = []
        for part in ids.tensor_split(layout.microbatches):
            loss = criterion(model(input_ids=part), part) * (len(part) / len(ids))
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        return float(torch.stack(losses).sum())

    return step


def _pipeline(shape: Any, layout: Layout, steps: int) -> Any:
    """A step of pipeflow; it returns the loss."""
    import torch

    import pipeflow
    from gpt3.build import build_gpt_pipeline, options_of
    from gpt3.model import GPTLMLoss, make_optimizer
    from pipeflow.optim import HalfPrecision

    precision = None if layout.mode is None else HalfPrecision(layout.mode, torch.bfloat16)  # type: ignore[arg-type]
    ranks = layout.ranks // (layout.tensor * layout.data)
    microbatches = layout.microbatches // layout.data
    schedule = pipeflow.make_schedule(layout.schedule or "1f1b", ranks=ranks, microbatches=microbatches)
    dtype = torch.float32 if precision is None else precision.parameters
    stages = build_gpt_pipeline(shape.layers, placement=schedule.placement, dtype=dtype, **options_of(shape))
    autocast = None if precision is None else precision.autocast
    model = pipeflow.Pipeline(stages, schedule, criterion=GPTLMLoss(), autocast=autocast)
    inner, rate = make_optimizer(model.parameters(), 4e-3, steps)
    optimizer: Any = inner if precision is None else precision.optimizer(model, inner)
    if layout.data > 1:
        optimizer = pipeflow.Zero(model, inner)

    def step(ids: torch.Tensor) -> float:
        optimizer.zero_grad()
        output = pipeflow.execute_pipeline(iter([({"input_ids": ids}, ids)]), model, broadcast_loss=True)
        pipeflow.clip_grad_norm_(model, 1.0)
        optimizer.step()
        rate.step()
        assert output.loss is not None  # it is broadcast
        return float(output.loss)

    return step
