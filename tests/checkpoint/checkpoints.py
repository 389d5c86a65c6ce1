"""What the tests of checkpoints save and load: a tiny language model of which some weights lie over the tensor ranks,
under any layout, and how its run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import (
    Output,
    Pipeline,
    PipelineSharedModuleWrapper,
    Schedule,
    execute_pipeline,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import Split
from pipeflow.testing import run_threads
from pipeflow.testing.models import WIDTH, WORDS, LayersStage, TiedModel, initial
from pipeflow.training.checkpoint.pieces import local_tensors

Layout = tuple[int, int, int]  # pipeline, tensor, data


class SplitWeight(nn.Module):
    """A weight that is stored in parts, one a tensor rank, and put together for use."""

    def __init__(self, whole: Tensor, dim: int) -> None:
        super().__init__()
        self.group = current_context().tensor
        self.split = Split(dim, whole.shape[dim])
        self.weight = nn.Parameter(_part(whole.detach(), self.split, self.group))

    def splits(self) -> Mapping[str, Split]:
        return {"weight": self.split}

    def partial_gradients(self) -> tuple[str, ...]:
        return ()

    def whole(self) -> Tensor:
        together: Tensor = _Together.apply(self.weight, self.split, self.group)  # type: ignore[no-untyped-call]
        return together


def _part(whole: Tensor, split: Split, group: Any) -> Tensor:
    """This rank's; what is padded is far from anything that a weight could be."""
    length = -(-split.size // group.size)
    missing = length * group.size - split.size
    moved = functional.pad(whole.movedim(split.dim, -1), (0, missing), value=1e9)
    return moved.narrow(-1, group.rank * length, length).movedim(-1, split.dim).contiguous()


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor, split: Split, group: Any) -> Tensor:
        context.split, context.group = split, group
        parts = part.new_empty(group.size * part.shape[0], *part.shape[1:])
        group.all_gather(parts, part.detach().contiguous()).wait()
        return torch.cat(parts.chunk(group.size), dim=split.dim).narrow(split.dim, 0, split.size).clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        part = _part(gradient, context.split, context.group)
        return part.masked_fill(part == 1e9, 0), None, None


class SplitStage(LayersStage):
    """Layers; before the first an embedding and after the last its transpose, and a square weight split by columns."""

    def __init__(self, model: TiedModel, start: int, end: int) -> None:
        super().__init__(model, start, end)
        ends = self.is_first or self.is_last
        self.words = SplitWeight(initial(1, WORDS, WIDTH, dtype=model.dtype), 0) if ends else None
        self.mix = SplitWeight(initial(7, WIDTH, WIDTH, dtype=model.dtype), 1) if self.is_last else None
        self.drop = nn.Dropout(0.1)
        self.batches: Tensor | None
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64) if self.is_first else None)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.batches is not None and self.words is not None:
            self.batches.add_(1)
            hidden = functional.embedding(hidden, self.words.whole())
        hidden = self.drop(self.run(hidden))
        if self.mix is not None and self.words is not None:
            hidden = hidden @ self.mix.whole() @ self.words.whole().T
        return hidden


class SplitModel(TiedModel):
    def stage(self, start: int, end: int) -> nn.Module:
        return SplitStage(self, start, end)

    def tie(self, chunks: nn.ModuleList, schedule: Schedule) -> None:
        words = [stage.words for stage in chunks if isinstance(stage, SplitStage) and stage.words is not None]
        if words and schedule.placement.num_stages > 1:
            shared = PipelineSharedModuleWrapper([0, schedule.placement.num_ranks - 1])
            for module in words:
                shared.register_module(module)


MODEL = SplitModel()


@dataclass
class Run:
    """A model, its optimizer and what the run has read, under the layout of the context. Layouts, and threads, draw
    dropout differently.
    """

    chunks: int = 1
    dropout: bool = False
    pipeline: Pipeline = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.LambdaLR = field(init=False)
    position: int = 0

    def __post_init__(self) -> None:
        context = current_context()
        name, options = ("1f1b", {}) if self.chunks == 1 else ("interleaved-1f1b", {"chunks": self.chunks})
        schedule = make_schedule(name, ranks=context.pipeline_size, microbatches=2, **options)
        chunks = MODEL.chunks(schedule, context.pipeline_rank)
        MODEL.tie(chunks, schedule)
        self.pipeline = Pipeline(chunks, schedule, criterion=MODEL.criterion).train(self.dropout)
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def train(self, steps: int) -> list[float]:
        """The losses of the next steps; every replica is given the same batch."""
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch = MODEL.batch(4, seed=self.position)
            losses.append(loss_of(execute_pipeline(iter([batch]), self.pipeline, broadcast_loss=True)))
            self.optimizer.step()
            self.scheduler.step()
            self.position += 1
        return losses

    def evaluate(self) -> float:
        """The loss of a batch that is not trained on."""
        batch = MODEL.batch(4, seed=99)
        return loss_of(execute_pipeline(iter([batch]), self.pipeline, forward_only=True, broadcast_loss=True))

    def save(self, path: Path, **options: Any) -> Any:
        return save_checkpoint(
            path,
            self.pipeline,
            self.optimizer,
            scheduler=self.scheduler,
            step=self.position,
            data=self.position,
            **options,
        )

    def load(self, path: Path) -> Any:
        loaded = load_checkpoint(path, self.pipeline, self.optimizer, self.scheduler)
        self.position = loaded.data
        return loaded

    def pieces(self) -> dict[str, tuple[tuple[int, ...], numpy.ndarray]]:
        """By name, where this rank's part begins and its values."""
        found = {}
        for each in local_tensors(self.pipeline, current_context(), None):
            for piece in each.pieces:  # none of it, or one
                found[each.name] = tuple(piece.offset), piece.tensor.numpy().copy()
        return found


def loss_of(output: Output) -> float:
    """The loss that was told to every rank."""
    assert output.loss is not None
    return output.loss.item()


def wholes(per_rank: list[dict[str, tuple[tuple[int, ...], numpy.ndarray]]]) -> dict[str, numpy.ndarray]:
    """Every tensor put together from the ranks' parts, all of which must agree."""
    shapes: dict[str, numpy.ndarray] = {}
    for pieces in per_rank:
        for name, (offset, part) in pieces.items():
            ends = [start + length for start, length in zip(offset, part.shape, strict=True)]
            shapes[name] = numpy.maximum(shapes.get(name, 0), ends)
    result = {name: numpy.full(shape.astype(int).tolist(), numpy.nan) for name, shape in shapes.items()}
    for pieces in per_rank:
        for name, (offset, part) in pieces.items():
            where = tuple(slice(start, start + length) for start, length in zip(offset, part.shape, strict=True))
            known = result[name][where]
            assert ((known == part) | numpy.isnan(known)).all(), name
            result[name][where] = part
    return result


def under(layout: Layout, function: Any, *arguments: object, run: Callable[..., list[Any]] = run_threads) -> list[Any]:
    """What `function(*arguments)` returns on every rank of a layout."""
    pipeline, tensor, data = layout
    return run(function, pipeline * tensor * data, *arguments, tensor=tensor, data=data)
