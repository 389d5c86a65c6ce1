"""Steps: the times of whole steps of a pipeline of all ranks, which run as training runs them. Must not contain: how
they are planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pipeflow.core.schedule import Schedule
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.planning.setup import PRECISIONS, Setup
from pipeflow.planning.transformer import GPT
from pipeflow.schedules import make_schedule
from pipeflow.tools.calibration.machine_times import StepTime
from pipeflow.tools.calibration.stopwatch import Stopwatch
from pipeflow.training.models.gpt import GPTLMLoss
from pipeflow.training.models.gpt_stages import build_gpt_pipeline

STEPS = ((192, 96), (320, 192))  # hidden size, tokens of a microbatch
HEAD = 64  # width of a head
LAYERS = 3  # per rank
VOCABULARY = 1024
MICROBATCHES = 2  # per rank


def steps(watch: Stopwatch, budget: float, sizes: Sequence[tuple[int, int]] = STEPS) -> Iterator[StepTime]:
    """Yields times of steps of GPTs of `sizes` (hidden size, tokens of a microbatch) in float32 under 1F1B, without the
    optimizer.
    """
    ranks = watch.context.pipeline_size
    schedule = make_schedule("1f1b", ranks=ranks, microbatches=MICROBATCHES * ranks)
    for hidden, tokens in sizes:
        gpt = GPT(LAYERS * ranks, hidden, hidden // HEAD, tokens, VOCABULARY, dropout=False)
        seconds = watch.seconds(_Step(gpt, schedule, watch.context.device), budget / len(sizes))
        yield StepTime(gpt, Setup(precision=PRECISIONS["float32"]), schedule, seconds)


class _Step:
    """A small GPT in a pipeline, whose steps this rank measures."""

    def __init__(self, gpt: GPT, schedule: Schedule, device: torch.device) -> None:
        stages = build_gpt_pipeline(
            gpt.layers,
            placement=schedule.placement,
            hidden_size=gpt.hidden,
            num_attention_heads=gpt.heads,
            vocab_size=gpt.vocabulary,
            max_position_embeddings=gpt.positions,
        )
        self._model = Pipeline(stages, schedule, criterion=GPTLMLoss())
        self._ids = torch.zeros(schedule.num_microbatches, gpt.positions, dtype=torch.long, device=device)

    def __call__(self) -> None:
        self._model.zero_grad()
        execute_pipeline(iter([({"input_ids": self._ids}, self._ids)]), self._model)
