"""The model of a task: a GPT of stock layers, or a stage of it whose layers are split over the tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeflow.tensor import LayerNorm, VocabParallelClassifier, VocabParallelEmbedding, checkpoint
from pipeflow.testing.models import initial
from tests.fuzz.configuration import Spread, Task
from tests.training.hybrid import VOCABULARY, WIDTH, Block, Work, drawn

Words = nn.Embedding | VocabParallelEmbedding | None
Head = nn.Linear | VocabParallelClassifier | None


class Stage(nn.Module):
    """Stage `stage` of `stages`: its layers, the words before the first one and the head after the last one."""

    def __init__(self, task: Task, stage: int, stages: int) -> None:
        super().__init__()
        self.task, self.is_last, self.checkpointing = task, stage == stages - 1, False
        start, end = (task.layers * border // stages for border in (stage, stage + 1))
        words, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.words: Words = drawn(words, 1000) if stage == 0 else None
        self.places = sparse_places() if stage == 0 and task.numbers == "sparse" else None
        self.phase = complex_phase() if self.is_last and task.numbers == "complex" else None
        self.blocks = nn.ModuleDict({str(index): Block(index) for index in range(start, end)})
        self.norm = drawn(nn.LayerNorm(WIDTH), 1001) if self.is_last else None
        self.head: Head = drawn(head, 1002 if task.tied == "no" else 1000) if self.is_last else None

    def split(self, spread: Spread) -> Self:
        """Over the tensor ranks."""
        options: dict[str, Any] = {"sequence_parallel": spread.sequence_parallel}
        self.checkpointing = spread.checkpointing
        if isinstance(self.words, nn.Embedding):
            self.words = VocabParallelEmbedding.from_native_module(self.words, **options)
        for block in self.of_layers():
            block.split(Work(sequence_parallel=spread.sequence_parallel))
        if self.norm is not None and isinstance(self.head, nn.Linear):
            self.norm = LayerNorm.from_native_module(self.norm, **options)
            self.head = VocabParallelClassifier.from_native_module(self.head, **options)
        return self

    def run(self, hidden: Any, scale: Tensor) -> Any:
        """What the next stage, or the loss, is given."""
        hidden = hidden if self.words is None else self._embed(self.words, hidden)
        first: Tensor | None = None
        if self.task.skips:
            hidden, first = (
                (hidden, self._skip(hidden)) if self.words is not None else (hidden["hidden"], hidden["first"])
            )
        for block in self.of_layers():
            hidden = scale.to(hidden.dtype) * (checkpoint(block, hidden) if self.checkpointing else block(hidden))
        if self.norm is not None and self.head is not None:
            return self.head(self.norm(self._turn(hidden if first is None else hidden + first)))
        return hidden if first is None else {"hidden": hidden, "first": first}

    def _embed(self, words: nn.Module, inputs: Tensor) -> Tensor:
        embedded: Tensor = words(inputs)
        return embedded if self.places is None else embedded + self.places(torch.arange(inputs.shape[1]) % 3)

    def _skip(self, hidden: Tensor) -> Tensor:
        """What goes on beside `hidden`: itself, or a lazy conjugate."""
        return hidden if self.task.numbers != "complex" else torch.complex(hidden, hidden * hidden).conj()

    def _turn(self, hidden: Tensor) -> Tensor:
        return hidden if self.phase is None else (hidden * self.phase).real

    def of_layers(self) -> Iterator[Block]:
        return (block for block in self.blocks.values() if isinstance(block, Block))


def sparse_places() -> nn.Embedding:
    """Vectors of positions, not all of which are used."""
    return drawn(nn.Embedding(5, WIDTH, sparse=True), 1003)


def complex_phase() -> nn.Parameter:
    """A complex number by which each feature is multiplied."""
    return nn.Parameter(torch.complex(*(initial(seed, WIDTH, dtype=torch.float64).detach() for seed in (1004, 1005))))


class Positional(Stage):
    """Takes what the stage before it returns, or the words."""

    def forward(self, hidden: Any) -> Any:
        return self.run(hidden, torch.ones((), dtype=torch.float64))


class NamedFirst(Stage):
    """The first stage of inputs that are a dict."""

    def forward(self, words: Tensor, scale: Tensor) -> Any:
        return self.run(words, scale)


class NamedLater(Stage):
    """A later one."""

    def forward(self, hidden: Any, *, scale: Tensor) -> Any:
        return self.run(hidden, scale)


def make_stage(task: Task, stage: int, stages: int) -> Stage:
    """The stage, in stock layers and the task's dtype."""
    kind = Positional if not task.named else NamedFirst if stage == 0 else NamedLater
    made = kind(task, stage, stages)
    return made.to(task.dtype) if task.numbers == "half" else made
