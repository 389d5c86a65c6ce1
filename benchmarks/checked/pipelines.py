"""pipeflow: any schedule over the ranks of a pipeline, with tensor ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipeflow
from benchmarks.checked.gpt import RATE, SIZES, STEPS, Sizes, batches, model
from pipeflow.checking import plant, record
from pipeflow.tensor import Rule

RANKS = 2
RULES = (
    Rule("attention", r"attention\.[qkv]"),
    Rule("row", r"attention\.o|down"),
    Rule("column", "up"),
    Rule("vocabulary", "embed"),
    Rule("head", "head"),
)
FAULTS: dict[str, tuple[str, str]] = {"coarse": ("precision", "blocks.3.up"), "drops": ("dropout", "blocks.2.act")}


class Mean(nn.CrossEntropyLoss):
    """The mean cross entropy of all labels of the batch."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.flatten(0, 1), target.flatten())


def run(folder: str, fault: str = "", sizes: Sizes = SIZES, schedule: str = "1f1b") -> None:
    """A recorded run on this rank."""
    context = pipeflow.current_context()
    words, labels = batches(sizes)
    made = pipeflow.make_schedule(schedule, ranks=context.pipeline_size, microbatches=4)
    criterion: Any = Mean()
    options: dict[str, Any] = {"rules": RULES}
    if fault == "weighed by samples":
        options["weigh"] = lambda wanted: float(len(wanted))
    example = (words[0], labels[0])
    pipeline = pipeflow.Pipeline.from_module(model(sizes), made, example, criterion=criterion, **options)
    optimizer = torch.optim.AdamW(pipeline.parameters(), RATE)
    chunk = next((each for each in pipeline.chunks if _has(each, FAULTS.get(fault, ("", ""))[1])), None)
    planted = plant(FAULTS[fault][0], chunk, FAULTS[fault][1]) if chunk is not None else None
    if planted is not None:
        planted.__enter__()
    with record(Path(folder), pipeline):
        for step in range(STEPS):
            optimizer.zero_grad()
            pipeflow.execute_pipeline(iter([(words[step], labels[step])]), pipeline)
            if fault == "wrong factor":
                _multiply(pipeline, "blocks.1.down", 4.0)
            optimizer.step()


def _has(module: nn.Module, name: str) -> bool:
    return bool(name) and any(own == name for own, _ in module.named_modules())


def _multiply(pipeline: nn.Module, name: str, factor: float) -> None:
    for own, parameter in pipeline.named_parameters():
        if name in own and parameter.grad is not None:
            parameter.grad *= factor
