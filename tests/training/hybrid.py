"""A GPT of stock layers, in one piece, and the same under a layout: cut into stages, its layers split over the tensor
ranks. What both have after some steps of training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, PipelineSharedModuleWrapper, Schedule, clip_grad_norm_, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.tensor import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    VocabParallelClassifier,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    checkpoint,
)
from pipeflow.testing.models import initial

VOCABULARY, WIDTH, HEADS, LENGTH = 13, 8, 4, 8  # no tensor size divides the vocabulary


AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class Work:
    """What is trained, and how."""

    layers: int = 4
    steps: int = 3
    samples: tuple[int, ...] = (4,)  # per replica
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    sequence_parallel: bool = False
    checkpointing: bool = False
    accumulation: int = 1
    max_norm: float | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})

    def batch(self, replica: int, call: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * replica + call)
        words = torch.randint(VOCABULARY, (self.samples[replica], LENGTH + 1), generator=generator)
        return words[:, :-1], words[:, 1:]


@dataclass(frozen=True)
class Trained:
    """What a rank has in the end: per call its loss, per step the norm; gradients and weights, by global name, each as
    (which part, its values).
    """

    losses: list[float | None]
    norms: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]


def drawn(module: AnyModule, seed: int) -> AnyModule:
    """`module` with weights that follow from `seed`, in float64."""
    for number, (name, parameter) in enumerate(module.named_parameters()):
        value = initial(100 * seed + number, *parameter.shape, dtype=torch.float64)
        module.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]] = value
    return module.double()


class Block(nn.Module):
    """Queries, keys and values lie together per head, so that a part of the columns is whole heads."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        drawn(self, 1 + index)

    def split(self, work: Work) -> None:
        """Over the tensor ranks."""
        options: dict[str, Any] = {"sequence_parallel": work.sequence_parallel}
        for name, layer in list(self.named_children()):
            if isinstance(layer, nn.LayerNorm):
                setattr(self, name, LayerNorm.from_native_module(layer, **options))
            elif isinstance(layer, nn.Linear):
                kind = ColumnParallelLinear if name in ("query_key_value", "up") else RowParallelLinear
                setattr(self, name, kind.from_native_module(layer, **options))

    def forward(self, hidden: Tensor) -> Tensor:
        joint = self.query_key_value(self.norm_1(hidden))
        query, key, value = joint.unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.down(functional.gelu(self.up(self.norm_2(hidden))))
        return output


Words = nn.Embedding | VocabParallelEmbedding | None
Head = nn.Linear | VocabParallelClassifier | None


class Stage(nn.Module):
    """Layers `start` to `end`, the words before the first and the head, which is tied to them, after the last."""

    def __init__(self, layers: int, start: int, end: int) -> None:
        super().__init__()
        words, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.words: Words = drawn(words, 1000) if start == 0 else None
        self.blocks = nn.ModuleDict({str(index): Block(index) for index in range(start, end)})
        self.norm = drawn(nn.LayerNorm(WIDTH), 1001) if end == layers else None
        self.head: Head = drawn(head, 1000) if end == layers else None
        self.checkpointing = False
        if self.words is not None and self.head is not None:
            self.head.weight = self.words.weight

    def split(self, work: Work) -> Stage:
        options: dict[str, Any] = {"sequence_parallel": work.sequence_parallel}
        self.checkpointing = work.checkpointing
        if isinstance(self.words, nn.Embedding):
            self.words = VocabParallelEmbedding.from_native_module(self.words, **options)
        for block in self.of_layers():
            block.split(work)
        if self.norm is not None and isinstance(self.head, nn.Linear):
            self.norm = LayerNorm.from_native_module(self.norm, **options)
            self.head = VocabParallelClassifier.from_native_module(self.head, **options)
            if self.words is not None:
                self.head.weight = self.words.weight
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.words is None else self.words(hidden)
        for block in self.of_layers():
            hidden = checkpoint(block, hidden) if self.checkpointing else block(hidden)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))

    def of_layers(self) -> Iterator[Block]:
        return (block for block in self.blocks.values() if isinstance(block, Block))


def train_in_one_piece(work: Work) -> Trained:
    """With stock layers and torch alone."""
    model = Stage(work.layers, 0, work.layers)
    optimizer = work.optimizer(model.parameters(), **work.options)
    losses: list[float | None] = []
    norms: list[float] = []
    for step in range(work.steps):
        optimizer.zero_grad()
        for call in range(step * work.accumulation, (step + 1) * work.accumulation):
            parts = [work.batch(replica, call) for replica in range(len(work.samples))]
            words, labels = (torch.cat(column) for column in zip(*parts, strict=True))
            loss = functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())
            loss.backward()
            losses.append(loss.item())
        if work.max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), work.max_norm)))
        optimizer.step()
    gradients: dict[str, Any] = {name: ([], gradient_of(parameter)) for name, parameter in model.named_parameters()}
    return Trained(losses, norms, gradients, {name: ([], p.detach().numpy()) for name, p in model.named_parameters()})


def train(work: Work, schedule: Schedule) -> Trained:
    """On one rank of the layout."""
    context, placement = current_context(), schedule.placement
    count = placement.num_stages
    cuts = [work.layers * stage // count for stage in range(count + 1)]
    held = placement.stages_of(context.pipeline_rank)
    stages = [Stage(work.layers, cuts[stage], cuts[stage + 1]).split(work) for stage in held]
    chunks = nn.ModuleList(stages)
    wrapper = PipelineSharedModuleWrapper([*placement.ranks_of(0), *placement.ranks_of(count - 1)])
    ends = [module for chunk in stages for module in (chunk.words, chunk.head)]
    for module in (module for module in ends if module is not None):
        wrapper.register_module(module)
    loss_of = VocabParallelCrossEntropy(vocab_size=VOCABULARY)
    model = Pipeline(chunks, schedule, criterion=lambda logits, labels: loss_of(logits, labels))
    optimizer = work.optimizer(model.parameters(), **work.options)
    losses: list[float | None] = []
    norms: list[float] = []
    for step in range(work.steps):
        optimizer.zero_grad()
        for call in range(step * work.accumulation, (step + 1) * work.accumulation):
            reduce = call == (step + 1) * work.accumulation - 1
            output = execute_pipeline(iter([work.batch(context.data_rank, call)]), model, reduce=reduce)
            losses.append(None if output.loss is None else output.loss.item())
        if work.max_norm is not None:
            norms.append(float(clip_grad_norm_(model, work.max_norm)))
        optimizer.step()
    splits = splits_of(model)
    parts = {
        name.split(".", 2)[2]: (part_of(parameter, splits, context.tensor_rank), parameter)
        for name, parameter in model.named_parameters()
    }
    return Trained(
        losses,
        norms,
        {name: (part, gradient_of(p)) for name, (part, p) in parts.items()},
        {name: (part, p.detach().numpy()) for name, (part, p) in parts.items()},
    )


def gradient_of(parameter: nn.Parameter) -> Any:
    assert parameter.grad is not None
    return parameter.grad.numpy()


def part_of(parameter: nn.Parameter, splits: dict[int, Any], rank: int) -> list[tuple[int, int, int]]:
    """Which part of the whole a rank has: each dimension that is split, from where, and how many entries that are no
    padding.
    """
    split, parts = splits.get(id(parameter)), []
    while split is not None:
        length, start = parameter.shape[split.dim], split.place(rank) * parameter.shape[split.dim]
        parts.append((split.dim, start, max(0, min(length, split.size - start))))
        split = split.then
    return parts


def require_trained(results: list[Trained], expected: Trained, tolerance: float = 1e-9) -> None:
    """Every rank has the losses and norms, and its part of every gradient and weight."""
    assert any(result.losses[0] is not None for result in results)
    for result in results:
        if result.losses[0] is not None:
            _require_near(torch.tensor(result.losses), torch.tensor(expected.losses), tolerance, "losses")
        _require_near(torch.tensor(result.norms), torch.tensor(expected.norms), tolerance, "norms")
        for kind in ("gradients", "weights"):
            for name, (part, values) in getattr(result, kind).items():
                whole = torch.from_numpy(getattr(expected, kind)[_named(name, getattr(expected, kind))][1])
                mine = torch.from_numpy(values)
                for dim, start, length in part:
                    whole, mine = whole.narrow(dim, min(start, whole.shape[dim]), length), mine.narrow(dim, 0, length)
                _require_near(mine, whole, tolerance, f"{kind} {name}")


_IS_WORDS = re.compile(r"(.*\.)?(words|word_embeddings)\.weight").fullmatch


def _named(name: str, named: dict[str, Any]) -> str:
    """One piece has no name for the head, which is its words."""
    return name if name in named else next(filter(_IS_WORDS, named))


def _require_near(mine: Tensor, whole: Tensor, tolerance: float, what: str) -> None:
    assert mine.shape == whole.shape, what
    if mine.numel():
        error = float((mine - whole).abs().max())
        assert error <= tolerance * max(1.0, float(whole.abs().max())), f"{what}: {error} off"
