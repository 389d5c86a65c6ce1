"""Tiny models that can be cut between any two layers: a stage has layers `start` to `end`, and the plain model is a
single stage. A layer's initial weights depend only on its index, not on the thread or process that makes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.schedule import Schedule
from pipeflow.engine.runtime.gradients.weights import PipelineSharedModuleWrapper

WIDTH = 6
WORDS = 11


def initial(seed: int, *shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A weight drawn from `seed`; not from torch's default generator, which all threads share."""
    return nn.Parameter(_normal(torch.Generator().manual_seed(seed), *shape).div(WIDTH**0.5).to(dtype))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Layer(nn.Module):
    """A linear layer (its weight gradient can be deferred), a scale (its gradient cannot), and a nonlinearity."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight = initial(1000 + index, WIDTH, WIDTH, dtype=dtype)
        self.linear.bias = initial(2000 + index, WIDTH, dtype=dtype)
        self.scale = initial(3000 + index, WIDTH, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden) * (1 + self.scale))


class Words(nn.Module):
    """A token table: an embedding, or the head that shares its weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = initial(1, WORDS, WIDTH, dtype=dtype)

    def forward(self, words: Tensor) -> Tensor:
        return functional.embedding(words, self.weight)

    def score(self, hidden: Tensor) -> Tensor:
        """The head: a score for each word."""
        return functional.linear(hidden, self.weight)


class LayersStage(nn.Module):
    """Layers `start` to `end`, named by their index in the whole model: [batch, length, width] in and out."""

    def __init__(self, model: TinyModel, start: int, end: int) -> None:
        super().__init__()
        self.is_first, self.is_last = start == 0, end == model.layers
        self.layers = nn.ModuleDict({str(index): Layer(index, model.dtype) for index in range(start, end)})

    def run(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden) if mask is None else layer(hidden) * mask
        return hidden

    def forward(self, hidden: Tensor) -> Any:
        return self.run(hidden)


@dataclass(frozen=True)
class TinyModel(ABC):
    """A model with a number of layers, and batches for it."""

    layers: int = 4
    dtype: torch.dtype = torch.float64

    @abstractmethod
    def stage(self, start: int, end: int) -> nn.Module:
        """Makes the stage with layers `start` to `end`, and parts of the model before the first and after the last."""

    @abstractmethod
    def batch(self, samples: int, *, length: int = 3, seed: int = 0) -> tuple[Any, Any]:
        """Makes a batch `(inputs, labels)`; each sample is a sequence of `length`."""

    def criterion(self, output: Any, labels: Any) -> Tensor:
        return functional.mse_loss(output, labels)

    def cut(self, stages: int) -> list[tuple[int, int]]:
        """Returns the range of layers `(start, end)` of each stage, cut as evenly as possible."""
        ends = [self.layers * (stage + 1) // stages for stage in range(stages)]
        return list(zip([0, *ends], ends, strict=False))

    def chunks(self, schedule: Schedule, rank: int) -> nn.ModuleList:
        """Makes the stages of `rank`, in chunk order."""
        cut = self.cut(schedule.placement.num_stages)
        return nn.ModuleList(self.stage(*cut[stage]) for stage in schedule.placement.stages_of(rank))

    def tie(self, chunks: nn.ModuleList, schedule: Schedule) -> None:  # noqa: B027  # most models tie nothing
        """Ties the weights that `chunks` share with other stages."""

    def plain_step(self, batch: tuple[Any, Any], module: nn.Module | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of a batch and every parameter's gradient without a pipeline, as a reference.

        Adds to the gradients of `module`, by default a new model.
        """
        module = self.stage(0, self.layers) if module is None else module
        inputs, labels = batch
        output = module(**inputs) if isinstance(inputs, dict) else module(inputs)
        loss = self.criterion(output, labels)
        loss.backward()
        return loss.detach(), {name: value.grad for name, value in module.named_parameters() if value.grad is not None}


class PlainModel(TinyModel):
    """A model whose input and all activations are one tensor of the same shape, so `tensor_shape` can be set."""

    def stage(self, start: int, end: int) -> nn.Module:
        return LayersStage(self, start, end)

    def batch(self, samples: int, *, length: int = 3, seed: int = 0) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        values, labels = (_normal(generator, samples, length, WIDTH).to(self.dtype) for _ in range(2))
        return values, labels


class TiedModel(TinyModel):
    """A language model: an embedding before the first layer, whose weight is also the head after the last."""

    def stage(self, start: int, end: int) -> nn.Module:
        return TiedStage(self, start, end)

    def batch(self, samples: int, *, length: int = 3, seed: int = 0) -> tuple[Any, Any]:
        words = torch.randint(WORDS, (samples, length + 1), generator=torch.Generator().manual_seed(seed))
        return words[:, :-1], words[:, 1:]

    def criterion(self, output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), labels.flatten())

    def tie(self, chunks: nn.ModuleList, schedule: Schedule) -> None:
        placement = schedule.placement
        words = [module for module in chunks.modules() if isinstance(module, Words)]
        if words and placement.num_stages > 1:
            shared = PipelineSharedModuleWrapper(
                [*placement.ranks_of(0), *placement.ranks_of(placement.num_stages - 1)]
            )
            for module in words:
                shared.register_module(module)


class TiedStage(LayersStage):
    """Layers, the embedding before the first one and the tied head after the last one."""

    def __init__(self, model: TinyModel, start: int, end: int) -> None:
        super().__init__(model, start, end)
        self.words = Words(model.dtype) if self.is_first or self.is_last else None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.run(self.words(hidden) if self.words is not None and self.is_first else hidden)
        return self.words.score(hidden) if self.words is not None and self.is_last else hidden


class KeywordModel(TinyModel):
    """A model whose input is a dict: the first stage takes the values, every stage the mask, the last the offset."""

    def stage(self, start: int, end: int) -> nn.Module:
        return KeywordStage(self, start, end)

    def batch(self, samples: int, *, length: int = 3, seed: int = 0) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        values, offset, labels = (_normal(generator, samples, length, WIDTH).to(self.dtype) for _ in range(3))
        mask = torch.randint(2, (samples, length, 1), generator=generator, dtype=torch.bool)
        return {"values": values, "attention_mask": mask, "offset": offset, "name": "no tensor, and nobody's"}, labels


class KeywordStage(LayersStage):
    """Takes what it needs of the batch by name: its `forward` is one of the methods below."""

    forward: Any

    def __init__(self, model: TinyModel, start: int, end: int) -> None:
        super().__init__(model, start, end)
        forwards = {(True, True): self.whole, (True, False): self.first, (False, True): self.last}
        self.forward = forwards.get((self.is_first, self.is_last), self.middle)

    def first(self, values: Tensor, attention_mask: Tensor) -> Tensor:
        return self.run(values, attention_mask)

    def middle(self, hidden: Tensor, *, attention_mask: Tensor) -> Tensor:
        return self.run(hidden, attention_mask)

    def last(self, hidden: Tensor, offset: Tensor, attention_mask: Tensor) -> Tensor:
        return self.run(hidden, attention_mask) + offset

    def whole(self, values: Tensor, **others: Tensor) -> Tensor:
        return self.run(values, others["attention_mask"]) + others["offset"]


class TreeModel(TinyModel):
    """A model whose stages exchange trees: a hidden state, the first hidden state (a skip connection over all stages),
    a tensor without gradient, and integers.
    """

    def stage(self, start: int, end: int) -> nn.Module:
        return TreeStage(self, start, end)

    def batch(self, samples: int, *, length: int = 3, seed: int = 0) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(WORDS, (samples, length), generator=generator)
        scale, labels = (_normal(generator, samples, length, WIDTH).to(self.dtype) for _ in range(2))
        return (words, scale), {"target": labels}

    def criterion(self, output: Any, labels: Any) -> Tensor:
        return functional.mse_loss(output["hidden"], labels["target"])


class TreeStage(LayersStage):
    """Takes and returns a dict; the first stage makes it."""

    def __init__(self, model: TinyModel, start: int, end: int) -> None:
        super().__init__(model, start, end)
        self.words = Words(model.dtype) if self.is_first else None

    def forward(self, tree: Any) -> dict[str, Any]:
        if self.words is not None:
            words, scale = tree
            first = self.words(words)
            tree = {"hidden": first, "others": (first * scale, scale, words % 2)}
        hidden = self.run(tree["hidden"])
        if not self.is_last:
            return {"hidden": hidden, "others": tree["others"]}
        first, scale, odd = tree["others"]
        return {"hidden": hidden + first + scale * odd.unsqueeze(-1), "odd": odd}
