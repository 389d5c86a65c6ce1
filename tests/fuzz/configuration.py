"""Configurations drawn from a seed: what is trained, and how it is spread over ranks, before and after a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from pipeflow import Schedule
from pipeflow.schedules import SCHEDULES, options_of
from tests.families import accepts
from tests.runtime.work import drawn_at_random, schedule_of
from tests.training.hybrid import VOCABULARY

IGNORED = -100
MAX_RANKS = 8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
}
FREEZABLE = ("words head", "norm_1", "bias", "up", "project.weight", "blocks.0.", "words head blocks.0. blocks.1.")


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        tied: "no", "yes", or "object": where a rank has both, words and head are one parameter before they are tied.
        frozen: what names of frozen parameters have in them.
        thaws: whether all parameters are free from the second step on.
        ignored: whether labels are ignored here and there.
        named: whether inputs are a dict, one entry of which all stages take.
        skips: whether stages exchange a tree: the hidden state and the first one, which the last stage adds.
        accumulation: calls per step.
    """

    layers: int
    tied: str
    frozen: tuple[str, ...]
    thaws: bool
    ignored: bool
    named: bool
    skips: bool
    optimizer: str
    accumulation: int
    max_norm: float | None

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Of all parameters of `model`, which may have none."""
        return OPTIMIZERS[self.optimizer]([{"params": list(model.parameters())}])

    def freeze(self, model: torch.nn.Module, step: int) -> None:
        """Sets `requires_grad` as it is in that step."""
        frozen = () if self.thaws and step > 0 else self.frozen
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))


@dataclass(frozen=True)
class Spread:
    """How it is spread over ranks.

    Attributes:
        samples: per replica, those of a batch.
        known: whether the shape that passes between stages is given.
        overlap: who runs pairs: "engine", or a function "in turn".
    """

    schedule: Schedule
    tensor: int
    samples: tuple[int, ...]
    known: bool
    sequence_parallel: bool
    checkpointing: bool
    zero: bool
    masters: bool
    traced: bool
    overlap: str

    @property
    def data(self) -> int:
        return len(self.samples)

    @property
    def ranks(self) -> int:
        return self.schedule.placement.num_ranks * self.tensor * self.data


@dataclass(frozen=True)
class Configuration:
    """A task, trained for two steps under the first spread; saved, loaded and trained for one under the second, where
    there is one.
    """

    seed: int
    task: Task
    spreads: tuple[Spread, ...]
    steps: tuple[int, ...] = (2, 1)

    def batch(self, phase: int, call: int, replica: int) -> tuple[Any, Tensor]:
        """Inputs and labels of one replica in one call; evaluation's call is -1."""
        spread, place = self.spreads[phase], (self.seed, phase, call, replica)
        length = 4 if spread.known else Random(str(place[:3])).choice((4, 8))
        generator = torch.Generator().manual_seed(Random(str(place)).getrandbits(32))
        words = torch.randint(VOCABULARY, (spread.samples[replica], length + 1), generator=generator)
        inputs, labels = words[:, :-1], words[:, 1:].clone()
        if self.task.ignored:
            labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED
            labels[:, 0] = words[:, 1]
        scale = 1 + torch.rand(len(words), 1, 1, generator=generator, dtype=torch.float64)
        return ({"words": inputs, "scale": scale} if self.task.named else inputs), labels


def drawn(seed: int) -> Configuration:
    """The configuration of that seed."""
    random = Random(seed)
    skips = random.random() < 0.2
    task = Task(
        layers=random.randint(1, 3),
        tied=random.choice(("no", "yes", "object")),
        frozen=tuple(random.choice(FREEZABLE).split()) if random.random() < 0.4 else (),
        thaws=random.random() < 0.5,
        ignored=random.random() < 0.3,
        named=random.random() < 0.3,
        skips=skips,
        optimizer=random.choice(list(OPTIMIZERS)),
        accumulation=random.choice((1, 1, 1, 2)),
        max_norm=random.choice((None, 0.1, 100.0)),
    )
    return Configuration(seed, task, tuple(_spread(random, skips) for _ in range(random.randint(1, 2))))


def _spread(random: Random, skips: bool) -> Spread:
    schedule = _schedule(random)
    room = MAX_RANKS // schedule.placement.num_ranks
    tensor = random.choice([size for size in (1, 1, 2, 4) if size <= room])
    replicas = random.randint(1, min(3, room // tensor))
    known = not skips and random.random() < 0.5
    least, size = schedule.num_microbatches, random.randint(1, 2)
    return Spread(
        schedule=schedule,
        tensor=tensor,
        samples=tuple(least * size if known else least + random.randint(0, least) for _ in range(replicas)),
        known=known,
        sequence_parallel=random.random() < 0.5,
        checkpointing=random.random() < 0.2,
        zero=random.random() < 0.4,
        masters=random.random() < 0.3,
        traced=random.random() < 0.3,
        overlap=random.choice(("engine", "in turn")),
    )


def _schedule(random: Random) -> Schedule:
    """One of the registry, or a sound one that nobody would draw."""
    if random.random() < 0.25:
        return drawn_at_random(random.randrange(10_000))
    ranks = random.randint(1, 4)
    name = random.choice([name for name in SCHEDULES if accepts(name, ranks)])
    chunks = random.randint(1, 3) if "chunks" in options_of(name) else 1
    return schedule_of((name, ranks, chunks), random.randint(1, 4))
