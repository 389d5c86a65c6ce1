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
from tests.runtime.work import drawn_at_random, ordered_at_random, schedule_of
from tests.training.hybrid import VOCABULARY

IGNORED = -100
EVALUATION = -1  # the call that ends a phase
WORLDS = (1, 2, 2, 2, 3, 4, 4, 8)  # so many ranks at most
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "descent": partial(torch.optim.SGD, lr=0.1),
}
FREEZABLE = ("words head", "norm_1", "bias", "up", "project.weight", "blocks.0.", "words head blocks.0. blocks.1.")


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        numbers: "real"; "sparse" with an embedding of positions, whose gradient is sparse; "complex" with a weight of
            complex numbers, and conjugates between the stages that skip; "half" in bfloat16, gradients in float32.
        tied: "no", "yes", or "object": where a rank has both, words and head are one parameter before they are tied.
        frozen: what names of frozen parameters have in them.
        when: in which steps they are: "always", "first" or "later".
        ignored: whether labels are ignored here and there.
        named: whether inputs are a dict, one entry of which all stages take.
        skips: whether stages exchange a tree: the hidden state and the first one, which the last stage adds.
        accumulation: calls per step.
        zeroes: whether gradients are set to zero between steps, rather than to None.
        evaluates: whether each step begins with an evaluation.
    """

    numbers: str
    layers: int
    tied: str
    frozen: tuple[str, ...]
    when: str
    ignored: bool
    named: bool
    skips: bool
    optimizer: str
    accumulation: int
    max_norm: float | None
    zeroes: bool
    evaluates: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights on ranks; torch alone computes in float64."""
        return torch.bfloat16 if self.numbers == "half" else torch.float64

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Of all parameters of `model`, which may have none."""
        return OPTIMIZERS[self.optimizer]([{"params": list(model.parameters())}])

    def freeze(self, model: torch.nn.Module, step: int) -> None:
        """Sets `requires_grad` as it is in that step."""
        frozen = self.frozen if self.when == "always" or (self.when == "first") == (step == 0) else ()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))


@dataclass(frozen=True)
class Spread:
    """How it is spread over ranks.

    Attributes:
        samples: per replica, those of a batch.
        known: whether the shape that passes between stages is given.
        alternates: whether calls run other schedules of the placement, of other numbers of microbatches.
        overlap: who runs pairs: "engine", or a function "in turn".
    """

    schedule: Schedule
    tensor: int
    samples: tuple[int, ...]
    known: bool
    alternates: bool
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

    def schedule(self, phase: int, call: int) -> Schedule:
        """What that call runs."""
        spread, random = self.spreads[phase], Random(str((self.seed, phase, call, "schedule")))
        if not spread.alternates or random.random() < 0.3:
            return spread.schedule
        most = min(4, *spread.samples) if call >= 0 else 6  # an evaluation may have fewer samples
        other = ordered_at_random(spread.schedule.placement, random.randint(1, most), random, f"other-{call}")
        return other.with_reductions() if random.random() < 0.3 else other

    def batch(self, phase: int, call: int, replica: int) -> tuple[Any, Tensor]:
        """Inputs and labels of one replica in one call."""
        spread, place = self.spreads[phase], (self.seed, phase, call, replica)
        length = 4 if spread.known else Random(str(place[:3])).choice((4, 8))
        samples = spread.samples[replica]
        if spread.known:  # the size of a microbatch, too
            samples = samples // spread.schedule.num_microbatches * self.schedule(phase, call).num_microbatches
        generator = torch.Generator().manual_seed(Random(str(place)).getrandbits(32))
        words = torch.randint(VOCABULARY, (samples, length + 1), generator=generator)
        inputs, labels = words[:, :-1], words[:, 1:].clone()
        if self.task.ignored:
            labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED
            labels[:, 0] = words[:, 1]
        scale = 1 + torch.rand(len(words), 1, 1, generator=generator, dtype=torch.float64)
        return ({"words": inputs, "scale": scale} if self.task.named else inputs), labels


def drawn(seed: int) -> Configuration:
    """The configuration of that seed."""
    random = Random(seed)
    task = _task(random)
    return Configuration(seed, task, tuple(_spread(random, task) for _ in range(random.choice((1, 1, 1, 2)))))


def _task(random: Random) -> Task:
    numbers = random.choice(("real", "real", "real", "sparse", "complex", "half"))
    optimizer = random.choice(list(OPTIMIZERS))
    return Task(
        numbers=numbers,
        layers=random.choice((1, 1, 2, 3)),
        tied=random.choice(("no", "yes", "object")),
        frozen=tuple(random.choice(FREEZABLE).split()) if random.random() < 0.4 else (),
        when=random.choice(("always", "first", "later")),
        ignored=random.random() < 0.3,
        named=random.random() < 0.3,
        skips=random.random() < 0.2,
        optimizer="descent"
        if numbers in ("sparse", "half")
        else optimizer,  # what sparse and rounded gradients are for
        accumulation=random.choice((1, 1, 1, 2)),
        max_norm=None if numbers == "sparse" else random.choice((None, 0.1, 100.0)),  # torch clips no sparse ones
        zeroes=random.random() < 0.3,
        evaluates=random.random() < 0.3,
    )


def _spread(random: Random, task: Task) -> Spread:
    world = random.choice(WORLDS)
    schedule = _schedule(random, world)
    room = world // schedule.placement.num_ranks
    tensor = random.choice([size for size in (1, 1, 2, 4) if size <= room])
    replicas = random.randint(1, min(3, room // tensor))
    known = not task.skips and random.random() < 0.5
    least, size = schedule.num_microbatches, random.randint(1, 2)
    return Spread(
        schedule=schedule,
        tensor=tensor,
        samples=tuple(least * size if known else least + random.randint(0, least) for _ in range(replicas)),
        known=known,
        alternates=random.random() < 0.5,
        sequence_parallel=task.numbers not in ("sparse", "complex") and random.random() < 0.5,
        checkpointing=random.random() < 0.2,
        zero=random.random() < 0.4,
        masters=task.numbers == "half" or random.random() < 0.3,
        traced=random.random() < 0.3,
        overlap=random.choice(("engine", "in turn")),
    )


def _schedule(random: Random, max_ranks: int) -> Schedule:
    """One of the registry, or a sound one that nobody would draw."""
    if random.random() < 0.25:
        return drawn_at_random(random.randrange(10_000), min(4, max_ranks))
    ranks = random.randint(1, min(4, max_ranks))
    name = random.choice([name for name in SCHEDULES if accepts(name, ranks)])
    chunks = random.randint(1, 3) if "chunks" in options_of(name) else 1
    return schedule_of((name, ranks, chunks), random.randint(1, 4))
