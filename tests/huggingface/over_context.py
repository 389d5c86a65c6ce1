"""Models of transformers in one process, and the same over context ranks: what both have after some steps."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow import Pipeline, Schedule, make_schedule
from pipeflow.adapters.huggingface.shared_tokens import BIDIRECTIONAL
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import Split, splits_of
from pipeflow.engine.parallel.transport.protocol import Unconnected
from pipeflow.engine.tensor.layer import cut
from pipeflow.huggingface import CausalLMLoss, MaskedLMLoss, share_tokens
from tests.huggingface.test_shared_tokens import model_of
from tests.training.over_context import loop_in_one_process, loop_on_a_rank

TOLERANCE = 1e-12
VOCABULARY, LENGTH = 48, 16
MASKED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "phi3": {"sliding_window": 5},
    "qwen2": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2},
    "granite": {},
    "cohere": {},
    "qwen3_moe": {},
    "gpt2": {},
}
"""Families with what a window needs, if they have one."""


@dataclass(frozen=True)
class Work:
    """What is trained, and how. `samples` has the number of each replica. With `masked`, tokens see those of a window,
    in families that have one, and of their document, which are packed in all batches but the first. With `padded`,
    batches have a mask, which hides tokens at the start, in the middle and at the end of sequences.
    """

    kind: str
    name: str = "1f1b"
    pipeline: int = 2
    samples: tuple[int, ...] = (3,)
    steps: int = 2
    microbatches: int = 2
    slices: int = 1
    recomputed: bool = False
    masked: bool = False
    padded: bool = False
    max_norm: float = 0.05

    @property
    def schedule(self) -> Schedule:
        options: dict[str, Any] = {"chunks": 2} if self.name == "interleaved-1f1b" else {}
        if self.slices > 1:
            options["slices"] = self.slices
        return make_schedule(self.name, ranks=self.pipeline, microbatches=self.microbatches, **options)

    def model(self) -> Any:
        options = MASKED.get(self.kind, {}) if self.masked else {}
        return model_of(self.kind, num_hidden_layers=4, use_cache=False, **options)

    @property
    def criterion(self) -> Any:
        return MaskedLMLoss() if self.kind in BIDIRECTIONAL else CausalLMLoss()

    def batch(self, replica: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
        """Token ids, their positions, and labels, of which some ranks have none in a microbatch. The last sample ends
        with padding.
        """
        samples = self.samples[replica]
        generator = torch.Generator().manual_seed(100 * replica + step)
        ids = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
        positions = torch.arange(LENGTH).repeat(samples, 1)
        labels = ids.clone()
        labels[0, : LENGTH - 2] = -100
        labels[1, LENGTH // 4 + replica : 3 * LENGTH // 4] = -100
        ids[-1, -3:], labels[-1, -3:] = 0, -100
        if self.masked and step:
            positions[0] = torch.cat([torch.arange(3), torch.arange(LENGTH - 3)])
            positions[1] = torch.cat([torch.arange(7), torch.arange(1), torch.arange(LENGTH - 8)])
            labels[positions == 0] = -100
        entries = {"input_ids": ids, "position_ids": positions}
        if self.padded:
            mask = torch.ones_like(ids)
            if step:  # in the middle, labels of padding count, too
                mask[-1, -3:] = mask[0, :3] = mask[1, 4:6] = 0
                positions[0] = (mask[0].cumsum(0) - 1).clamp(0)
            entries["attention_mask"] = mask
        return entries, labels


@dataclass(frozen=True)
class Trained:
    """What a rank has in the end. Gradients and weights are by name, each with its split and the tensor rank."""

    losses: list[float | None]
    norms: list[float]
    gradients: dict[str, tuple[Any, Split | None]]
    weights: dict[str, tuple[Any, Split | None]]
    tensor: tuple[int, int] = (0, 1)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)


def _ended(
    named: dict[str, nn.Parameter],
    losses: list[float | None],
    norms: list[float],
    splits: dict[int, Split],
    tensor: tuple[int, int] = (0, 1),
) -> Trained:
    gradients = {name: (p.grad.numpy(), splits.get(id(p))) for name, p in named.items() if p.grad is not None}
    weights = {name: (p.detach().numpy(), splits.get(id(p))) for name, p in named.items()}
    return Trained(losses, norms, gradients, weights, tensor)


def train_in_one_process(work: Work) -> Trained:
    """All replicas' batches at once, with the model's own attention."""
    model = work.model()
    losses, norms = loop_in_one_process(work, model, work.criterion, optimizer_of(model.parameters()))
    return _ended(dict(model.named_parameters()), losses, norms, {})


def recompute(model: Any) -> None:
    """Makes the blocks of a model recompute in the backward."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # its old name
    enable({"use_reentrant": False})


def train(work: Work, whole: Any) -> Trained:
    """On one rank of the layout."""
    context, model = current_context(), share_tokens(deepcopy(whole))
    if work.recomputed:
        recompute(model)
    pipeline = Pipeline.from_module(model, work.schedule, work.batch(0, 0), criterion=work.criterion)
    losses, norms = loop_on_a_rank(work, pipeline, optimizer_of(pipeline.parameters()))
    tensor = context.tensor_rank, context.tensor_size
    return _ended(dict(pipeline.named_parameters()), losses, norms, splits_of(pipeline), tensor)


def require_trained(results: list[Trained], expected: Trained) -> None:
    """Every rank has the losses and norms, and its part of every gradient and weight; together they have all."""
    assert any(result.losses[0] is not None for result in results)
    for kind in ("gradients", "weights"):
        assert {name for result in results for name in getattr(result, kind)} == set(getattr(expected, kind))
    for result in results:
        if result.losses[0] is not None:
            _require_near(torch.tensor(result.losses), torch.tensor(expected.losses), "losses")
        _require_near(torch.tensor(result.norms), torch.tensor(expected.norms), "norms")
        for kind in ("gradients", "weights"):
            for name, (values, split) in getattr(result, kind).items():
                whole = torch.from_numpy(getattr(expected, kind)[name][0])
                own = cut(whole, split, Unconnected(*result.tensor))
                _require_near(torch.from_numpy(values), own, f"{kind} {name}")


def _require_near(mine: Tensor, whole: Tensor, what: str) -> None:
    assert mine.shape == whole.shape, what
    error = float((mine - whole).abs().max()) if mine.numel() else 0.0
    assert error <= TOLERANCE * max(1.0, float(whole.abs().max())), f"{what}: {error} off"
