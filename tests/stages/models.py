"""Small models in the styles that are common, whole modules that know nothing of pipelines, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, LENGTH = 6, 11, 5
Batch = dict[str, Any]


@dataclass
class Output:
    """As libraries of models return."""

    loss: Tensor | None
    logits: Tensor


torch.utils._pytree.register_dataclass(Output)


class Block(nn.Module):
    """A residual block, which may be given what positions turn by."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, turns: Tensor | None = None) -> Tensor:
        inner = self.norm(hidden)
        inner = self.up(inner if turns is None else inner * turns)
        output: Tensor = hidden + self.down(torch.tanh(inner))
        return output


class Turns(nn.Module):
    """As rotary embeddings: buffers alone, computed from positions."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1, WIDTH, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        turned: Tensor = torch.cos(positions.unsqueeze(-1) * self.frequencies).to(hidden.dtype)
        return turned


def next_word_loss(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    if labels is None:
        return None
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Decoder(nn.Module):
    """A language model whose head is its embedding; a layer of it is never used."""

    def __init__(self, blocks: int = 4, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.turns = Turns()
        self.layers = nn.ModuleList(kind() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Linear(WIDTH, 2)
        self.checkpointing: bool | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        hidden = self.words(input_ids)
        positions = torch.arange(input_ids.shape[1], device=hidden.device).unsqueeze(0)
        turns = self.turns(hidden, positions)
        if attention_mask is not None and not attention_mask.all():
            turns = turns * attention_mask.unsqueeze(-1)
        for layer in self.layers:
            if self.checkpointing is None:
                hidden = layer(hidden, turns)
            else:
                hidden = checkpoint(layer, hidden, turns, use_reentrant=self.checkpointing)
        logits = self.head(self.norm(hidden))
        return Output(next_word_loss(logits, labels), logits)


class Shared(nn.Module):
    """One block that is called four times; a parameter of the root, which is added before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.groups = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        hidden = self.words(input_ids) + self.start
        for _ in range(4):
            hidden = self.groups[0](hidden)
        logits = self.head(hidden)
        return {"loss": next_word_loss(logits, labels), "logits": logits}


class Cross(nn.Module):
    """A block that also takes what an encoder made, and the bias that the first one made for all."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.block = Block()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(LENGTH, WIDTH) if first else None

    def forward(self, hidden: Tensor, memory: Tensor, bias: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        if self.bias is not None:
            bias = self.bias(torch.arange(hidden.shape[1]))
        assert bias is not None
        return self.block(hidden) + self.mix(memory.mean(1, keepdim=True)) * bias, {"bias": bias, "name": "cross"}


class EncoderDecoder(nn.Module):
    """Two stacks, one embedding for both and for the head; blocks of the second return tuples with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = Stack(self.words)
        self.decoder = nn.ModuleDict({"block": nn.ModuleList(Cross(index == 0) for index in range(3))})

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
        memory = self.encoder(input_ids)["memory"]
        hidden, bias = self.words(labels.clamp(min=0).roll(1, 1)), None
        blocks = self.decoder["block"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            hidden, others = block(hidden, memory, bias)
            bias = others["bias"]
        logits = functional.linear(hidden, self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Stack(nn.Module):
    """An encoder."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words
        self.block = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for block in self.block:
            hidden = block(hidden)
        return {"memory": self.norm(hidden)}


class UNet(nn.Module):
    """Skips from the way down to the way up; convolutions, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.downs = nn.ModuleList(nn.ModuleList([Convolution(4, 4), nn.AvgPool2d(2)]) for _ in range(2))
        self.middle = Convolution(4, 4)
        self.ups = nn.ModuleList(nn.ModuleList([nn.Upsample(scale_factor=2), Convolution(8, 4)]) for _ in range(2))
        self.leave = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        hidden, skips = self.enter(image), []
        for down in self.downs:
            assert isinstance(down, nn.ModuleList)
            hidden = down[0](hidden)
            skips.append(hidden)
            hidden = down[1](hidden)
        hidden = self.middle(hidden)
        for up in self.ups:
            assert isinstance(up, nn.ModuleList)
            hidden = up[1](torch.cat([up[0](hidden), skips.pop()], 1))
        output: Tensor = self.leave(hidden)
        return output


class Convolution(nn.Module):
    """A convolution between two activations that write to their input: the first to what the block is given."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(before, after, 3, padding=1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, image: Tensor) -> Tensor:
        output: Tensor = self.act(self.layer(self.act(image)))
        return output


class Dense(nn.Module):
    """Every block takes what all before it made."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH * (index + 1), WIDTH) for index in range(blocks))

    def forward(self, values: Tensor) -> Tensor:
        found = [values]
        for block in self.blocks:
            found.append(torch.tanh(block(torch.cat(found, -1))))
        return found[-1]


@dataclass(frozen=True)
class Case:
    """A model, how batches for it are made, and the loss, where it makes none itself."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    criterion: Callable[[Any, Any], Tensor] | None = None

    def module(self, seed: int = 0) -> nn.Module:
        """The same one for the same seed, in any thread."""
        return seeded(self.make().double(), seed)

    def plain_loss(self, module: nn.Module, batch: Any) -> Tensor:
        """Without a pipeline."""
        inputs, labels = batch if isinstance(batch, tuple) else (batch, None)
        output = module(**inputs) if isinstance(inputs, dict) else module(inputs)
        if self.criterion is not None:
            return self.criterion(output, labels)
        loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", None)
        loss = output[0] if isinstance(output, tuple) else loss
        assert isinstance(loss, Tensor)
        return loss


def seeded(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def sentences(samples: int, *, length: int = LENGTH, hidden: int = 1) -> Batch:
    """Words, of which the last are not there in some, so that their labels do not count."""
    words = torch.randint(WORDS, (samples, length), generator=torch.Generator().manual_seed(samples))
    mask = torch.ones_like(words)
    for sample in range(samples):
        mask[sample, length - sample % (hidden + 1) :] = 0
    return {"input_ids": words, "labels": words.masked_fill(mask == 0, -100)}


def masked_sentences(samples: int) -> Batch:
    batch = sentences(samples, hidden=3)
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


def images(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    image, target = (torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return image, target


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    values, target = (torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return values, target


def sequential() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def checkpointed(reentrant: bool) -> nn.Module:
    made = Decoder()
    made.checkpointing = reentrant
    return made


CASES = {
    "sequential": Case(sequential, vectors, functional.mse_loss),
    "decoder": Case(Decoder, masked_sentences),
    "shared": Case(Shared, sentences),
    "encoder-decoder": Case(EncoderDecoder, sentences),
    "u-net": Case(UNet, images, functional.mse_loss),
    "dense": Case(Dense, vectors, functional.mse_loss),
    "checkpointed": Case(lambda: checkpointed(False), sentences),
    "reentrant": Case(lambda: checkpointed(True), sentences),
}
