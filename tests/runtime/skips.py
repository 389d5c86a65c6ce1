"""Stages that hand tensors to later ones than the next, and what they send, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Schedule
from pipeflow.core.route import Routes, routes_among, sources_of, targets_of
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Start, Tag, Work
from pipeflow.testing.models import WIDTH, Layer, initial

Given = list[tuple[int, int]]


def all_routes(stages: int) -> Given:
    """Every stage to every later one."""
    return [pair for pair in combinations(range(stages), 2) if pair[1] > pair[0] + 1]


def some_routes(stages: int, seed: int) -> Given:
    """Any of them, at least one where there is one."""
    every, random = all_routes(stages), Random(seed)
    return random.sample(every, random.randint(min(1, len(every)), len(every)))


class Skipping(nn.Module):
    """Adds up its layer of what the stage before made and of all that came on routes. To some stages it hands its
    output alone, to others a tree, in which there are numbers without a gradient and what it has received itself.
    """

    def __init__(self, stage: int, stages: int, routes: Routes) -> None:
        super().__init__()
        self.layer = Layer(stage, torch.float64)
        self.sources = sources_of(stage, routes)[1:]
        self.targets = targets_of(stage, stages, routes)
        seeds = [500 + 50 * stage + source for source in self.sources]
        self.mixes = nn.ParameterList(initial(seed, WIDTH, dtype=torch.float64) for seed in seeds)

    def forward(self, hidden: Tensor, *came: Any) -> Any:
        made = self.layer(hidden)
        for mix, tree in zip(self.mixes, came, strict=True):
            values = tree if isinstance(tree, Tensor) else tree["values"] * tree["signs"] + sum(tree["others"])
            made = made + torch.sin(values * mix)
        if len(self.targets) < 2:
            return made
        received = [tree for tree in came if isinstance(tree, Tensor)]
        signs = (made.detach() > 0).long() * 2 - 1
        tree = {"values": made, "signs": signs, "others": [signs, *received]}
        return (made, *(made if target % 2 else tree for target in self.targets[1:]))


def serial(modules: list[Skipping], values: Tensor) -> Tensor:
    """The stages one after the other, without a pipeline."""
    sent: dict[tuple[int, int], Any] = {}
    output: Any = values
    for stage, module in enumerate(modules):
        came = [sent[source, stage] for source in module.sources]
        output = module(output, *came)
        if len(module.targets) > 1:
            output, *others = output
            sent.update({(stage, target): other for target, other in zip(module.targets[1:], others, strict=True)})
    assert isinstance(output, Tensor)
    return output


def modules_of(schedule: Schedule, given: Given) -> list[Skipping]:
    """All stages; the same ones in every thread."""
    stages = schedule.placement.num_stages
    return [Skipping(stage, stages, routes_among(stages, given)) for stage in range(stages)]


def batch_of(samples: int, length: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    values, labels = (torch.randn(samples, length, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return values, labels


def serial_step(schedule: Schedule, given: Given, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], Any, Any]:
    """The losses of batches, the outputs, and per stage the gradients of all batches together."""
    modules = modules_of(schedule, given)
    outputs = [serial(modules, values) for values, _ in batches]
    losses = [functional.mse_loss(output, labels) for output, (_, labels) in zip(outputs, batches, strict=True)]
    torch.stack(losses).sum().backward()
    gradients = {
        f"{stage}.{name}": each.grad for stage, module in enumerate(modules) for name, each in module.named_parameters()
    }
    return [loss.item() for loss in losses], [output.detach() for output in outputs], gradients


class Counted:
    """What a rank of a pipeline has sent since, by (tag, peer): how many bytes, and how many tensors."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[Tag, int]] = Counter()
        self.tensors: Counter[tuple[Tag, int]] = Counter()

    def of(self, *tags: Tag) -> int:
        """The bytes with these tags."""
        return sum(size for (tag, _), size in self.bytes.items() if tag in tags)

    @property
    def activations(self) -> int:
        return self.of(Tag.ACTIVATION, Tag.REDIRECTED)

    @property
    def gradients(self) -> int:
        return self.of(Tag.GRADIENT)


@contextmanager
def counted() -> Iterator[Counted]:
    """Counts what this rank sends within its pipeline, from Pipelines that are made meanwhile."""
    transport, found = current_context().transport, Counted()
    plain: Callable[[int, Tag], Start] = transport.sender

    def sender(peer: int, tag: Tag) -> Start:
        start = plain(peer, tag)

        def send(tensors: list[Tensor]) -> Work:
            found.bytes[tag, peer] += sum(tensor.nbytes for tensor in tensors)
            found.tensors[tag, peer] += len(tensors)
            return start(tensors)

        return send

    vars(transport)["sender"] = sender
    try:
        yield found
    finally:
        vars(transport).pop("sender")
