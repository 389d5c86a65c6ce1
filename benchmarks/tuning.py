"""One slow job, made faster move by move: docs/tuning.md tells how each move was found. All variants train the same
model on the same batches with 2 ranks, in turns. A variant has one more move than the one before it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, SAMPLES, LENGTH = 2, 16, 128
WIDTH, HEADS, BLOCKS, WORDS = 256, 4, 8, 8192
READING = 0.06  # seconds for which a batch is waited for, as on a slow file system

START = "as it was written"
MOVES: dict[str, dict[str, Any]] = {
    START: {"schedule": "1f1b", "microbatches": 4},
    "a worker reads batches ahead": {"ahead": True},
    "cut by measured costs": {"balanced": True},
    "no checkpointing, since activations fit": {"checkpointed": False},
    "8 microbatches instead of 4": {"microbatches": 8},
    "gradient_accumulation_fusion": {"fusion": True},
    "AdamW in one kernel": {"fused": True},
    "zb-v instead of 1f1b": {"schedule": "zb-v"},
}


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 21
    results = run_ranks("tuning:measure", RANKS, {"rounds": rounds}, deadline=300 + 20 * rounds)
    seconds = step_times(results)
    title = f"tuning: {BLOCKS} blocks of width {WIDTH} on {RANKS} ranks, {WORDS} words, {SAMPLES} x {LENGTH} tokens"
    report = Report("tuning", f"{title}, {rounds} rounds", ["", "ms a step", "x the start", "x the move before"])
    report.data = {"seconds": seconds}
    before = START
    for name in MOVES:
        ratios = [f"{paired(seconds, name, other):.3f}" for other in (START, before)]
        report.rows.append([name, f"{1e3 * statistics.median(seconds[name]):.0f}", *ratios])
        before = name
    report.notes.append("each row has the moves of all rows above it; ratios are medians over rounds")
    report.notes.append("target: 0.7 x the start")
    return report


def measure(rounds: int) -> dict[str, list[float]]:
    """On every rank: the seconds of each variant's steps. All must have the same first loss."""
    import torch

    from benchmarks.measure import alternate

    options: dict[str, Any] = {}
    contenders, losses = {}, []
    for name, move in MOVES.items():
        options |= move
        contenders[name] = contender(name, **options)
        losses.append(float(contenders[name].step()))
    torch.testing.assert_close(losses, losses[:1] * len(losses), rtol=1e-5, atol=0)
    return alternate(contenders, rounds)


def contender(
    name: str,
    *,
    schedule: str,
    microbatches: int,
    checkpointed: bool = True,
    ahead: bool = False,
    balanced: bool = False,
    fusion: bool = False,
    fused: bool = False,
) -> Any:
    """A step of the job: it reads a batch, trains, clips and steps."""
    import torch
    from torch import nn

    import pipeflow
    from benchmarks.task import Contender

    made = pipeflow.make_schedule(schedule, ranks=RANKS, microbatches=microbatches)
    torch.manual_seed(0)
    blocks = layers(checkpointed=checkpointed)
    costs: Any = "uniform"
    if balanced:
        costs = pipeflow.measure_layers(blocks, torch.zeros(SAMPLES // microbatches, LENGTH, dtype=torch.long))
    stages = pipeflow.build_stages(blocks, made.placement, partition=costs)
    model = pipeflow.Pipeline(stages, made, criterion=loss, gradient_accumulation_fusion=fusion)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=fused)  # the rate is 0, so that losses stay alike
    batches = iter(torch.utils.data.DataLoader(texts(), batch_size=None, num_workers=int(ahead)))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        output = pipeflow.execute_pipeline(batches, model, broadcast_loss=True)
        pipeflow.clip_grad_norm_(model, 1.0)
        optimizer.step()
        assert output.loss is not None  # it is broadcast
        return output.loss

    return Contender(name, step, [nn.Module()], model)


def layers(*, checkpointed: bool) -> list[Any]:
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from benchmarks.models import Block

    class Checkpointed(Block):
        def forward(self, hidden: Any) -> Any:
            return checkpoint(super().forward, hidden, use_reentrant=False)

    kind = Checkpointed if checkpointed else Block
    blocks = [kind(WIDTH, HEADS) for _ in range(BLOCKS)]
    return [nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)]


def loss(scores: Any, words: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def texts() -> Any:
    """Batches of words for ever, each of which takes its time to be read."""
    import torch

    class Texts(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
            while True:
                time.sleep(READING)
                yield words[:, :-1], words[:, 1:]

    return Texts()
