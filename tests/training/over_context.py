"""pipeflow's GPT in one process, and the same over context ranks: what both have after some steps of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow import (
    Pipeline,
    Schedule,
    Zero,
    clip_grad_norm_,
    execute_pipeline,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.models import GPTLMLoss, build_gpt_pipeline, build_stage
from pipeflow.tensor import manual_seed
from tests.training.hybrid import Trained, gradient_of, part_of

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 13, 16, 4, 4, 16  # no tensor size divides the vocabulary
CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved-1f1b": 2, "zb-v": 2}


@dataclass(frozen=True)
class Gpt:
    """What is trained, and how. `samples` has the number of each replica."""

    name: str = "1f1b"
    pipeline: int = 1
    samples: tuple[int, ...] = (3,)
    steps: int = 3
    microbatches: int = 3
    checkpoint: bool = False
    sequence_parallel: bool = False
    zero: bool = False
    gives_positions: bool = False
    context_attention: str = "gather"
    slices: int = 1
    dropout: float = 0.0
    max_norm: float = 0.05

    @property
    def schedule(self) -> Schedule:
        options: dict[str, Any] = {"chunks": 2} if self.name == "interleaved-1f1b" else {}
        options |= {"slices": self.slices} if self.slices > 1 else {}
        return make_schedule(self.name, ranks=self.pipeline, microbatches=self.microbatches, **options)

    @property
    def options(self) -> dict[str, Any]:
        sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
        rates = dict.fromkeys(("embed_drop_rate", "attn_drop_rate", "drop_rate"), self.dropout)
        return {**sizes, **rates, "max_position_embeddings": LENGTH, "dtype": torch.float64, "seed": 3}

    def batch(self, replica: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
        """Tokens and labels. The first sample's labels count at its end alone, and those of other replicas mostly not:
        so ranks have unlike numbers of labels, and some have none in a microbatch.
        """
        generator = torch.Generator().manual_seed(100 * replica + step)
        tokens = torch.randint(VOCABULARY, (self.samples[replica], LENGTH), generator=generator)
        labels = tokens.clone()
        labels[0, : LENGTH - 2] = -100
        labels[1, LENGTH // 4 + replica : 3 * LENGTH // 4] = -100
        entries = {"input_ids": tokens}
        if self.gives_positions:
            entries["position_ids"] = torch.arange(LENGTH).flip(0).expand(len(tokens), -1)
        return entries, labels


def livened(module: nn.Module) -> None:
    """Makes initial weights larger, so that attention differs from a mean."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(12 if parameter.dim() > 1 else 1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)


def loop_in_one_process(
    work: Any, model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[float | None], list[float]]:
    """Losses and norms of all replicas' batches at once, with torch's own loop."""
    losses, norms = list[float | None](), list[float]()
    for step in range(work.steps):
        optimizer.zero_grad()
        parts = [work.batch(replica, step) for replica in range(len(work.samples))]
        inputs = {name: torch.cat([entries[name] for entries, _ in parts]) for name in parts[0][0]}
        loss = criterion(model(**inputs), torch.cat([labels for _, labels in parts]))
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), work.max_norm)))
        optimizer.step()
    return losses, norms


def loop_on_a_rank(
    work: Any, model: Pipeline, optimizer: Any, first: int = 0
) -> tuple[list[float | None], list[float]]:
    """Losses and norms of this replica's batches, from step `first` on."""
    losses, norms = list[float | None](), list[float]()
    for step in range(first, work.steps):
        optimizer.zero_grad()
        output = execute_pipeline(iter([work.batch(current_context().data_rank, step)]), model)
        losses.append(None if output.loss is None else output.loss.item())
        norms.append(float(clip_grad_norm_(model, work.max_norm)))
        optimizer.step()
    return losses, norms


def train_in_one_process(work: Gpt) -> Trained:
    """All replicas' batches at once."""
    model = build_stage(0, LAYERS, LAYERS, first=True, last=True, **work.options)
    livened(model)
    losses, norms = loop_in_one_process(work, model, GPTLMLoss(), adamw(model.parameters()))
    named = dict(model.named_parameters())
    gradients: dict[str, Any] = {name: ([], gradient_of(parameter)) for name, parameter in named.items()}
    return Trained(losses, norms, gradients, {name: ([], p.detach().numpy()) for name, p in named.items()})


def pipeline_of(work: Gpt) -> Pipeline:
    schedule = work.schedule
    chunks = build_gpt_pipeline(
        LAYERS,
        placement=schedule.placement,
        checkpoint=work.checkpoint,
        sequence_parallel=work.sequence_parallel,
        **work.options,
    )
    livened(chunks)
    if work.dropout:
        manual_seed(4)
    return Pipeline(chunks, schedule, criterion=GPTLMLoss())


def train(work: Gpt, folder: str = "", first: int = 0) -> Trained:
    """On one rank of the layout, from step `first` on, which a checkpoint in `folder` has; the end is saved there."""
    context, model = current_context(), pipeline_of(work)
    optimizer: Any = adamw(model.parameters())
    optimizer = Zero(model, optimizer) if work.zero else optimizer
    if first:
        load_checkpoint(folder, model, optimizer)
    losses, norms = loop_on_a_rank(work, model, optimizer, first)
    if folder:
        save_checkpoint(folder, model, optimizer)
    splits = splits_of(model)
    parts = {
        name.removeprefix("chunks.").partition(".")[2]: (part_of(parameter, splits, context.tensor_rank), parameter)
        for name, parameter in model.named_parameters()
    }
    return Trained(
        losses,
        norms,
        {name: (part, gradient_of(p)) for name, (part, p) in parts.items() if p.grad is not None},
        {name: (part, p.detach().numpy()) for name, (part, p) in parts.items()},
    )
