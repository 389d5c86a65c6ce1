"""Expert parallelism by hand: two replicas, each with half of the experts. Tokens are gathered, outputs added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from benchmarks.checked.llama import (
    AUXILIARY,
    STEPS,
    Experts,
    Sizes,
    batches,
    count,
    model,
    optimizer_of,
    sum_of_experts,
    total_loss,
)
from benchmarks.checked.split import Copied, Summed
from pipeflow.checking import record

RANKS = 2
SIZES = Sizes(experts=4, layers=2)
CAPACITY = 10  # tokens of an expert, in a fault


class All(torch.autograd.Function):
    """The samples of all ranks; gradients of the own ones are added up."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(RANKS)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(RANKS)[dist.get_rank()]


class Divided(Experts):
    """A layer of which this rank has some experts."""

    fault = ""

    def forward(self, values: Tensor) -> Tensor:
        shares = self.router(values).softmax(-1)
        weight, chosen = shares.max(-1)
        counts = F.one_hot(chosen, shares.shape[-1]).float().sum((0, 1))
        own = shares.sum((0, 1))
        both: Tensor = Summed.apply(Copied.apply(torch.stack([own, counts])))  # type: ignore[no-untyped-call]  # torch's
        self.auxiliary = (both[0] * both[1]).sum() / RANKS
        everybody = [torch.empty_like(chosen) for _ in range(RANKS)]
        dist.all_gather(everybody, chosen)
        if self.fault == "tokens of another rank":
            everybody.reverse()
        found: Any = sum_of_experts(self.experts, All.apply(values), torch.cat(everybody))  # type: ignore[no-untyped-call]  # torch's
        found = Summed.apply(Copied.apply(found)) if self.fault != "outputs not summed" else found  # type: ignore[no-untyped-call]  # torch's
        mine: Tensor = found.chunk(RANKS)[dist.get_rank()]
        if self.fault == "capacity":  # an expert takes its first tokens alone
            places = F.one_hot(chosen, shares.shape[-1]).flatten(0, 1).cumsum(0).view(*chosen.shape, -1)
            mine = mine * (places.gather(-1, chosen[..., None]) <= CAPACITY)
        return mine.mul(weight[..., None])


def run(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run on this rank."""
    rank = dist.get_rank()
    made: Any = model(sizes)
    each = sizes.experts // RANKS
    for name, layer in made.layers.items():
        layer.feed.__class__ = Divided
        layer.feed.fault = fault if name == "1" else ""
        if fault == "experts exchanged" and name == "1":
            _exchange(layer.feed.experts, each)
        for index in range(sizes.experts):
            if index // each != rank:
                del layer.feed.experts[str(index)]
    optimizer = optimizer_of(made)
    words, labels = batches(sizes)
    mine = slice(rank * sizes.batch // RANKS, (rank + 1) * sizes.batch // RANKS)
    with record(Path(folder), made):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = total_loss(made(words[step, mine]), labels[step, mine]) / count(labels[step])
            balance = (
                sum(layer.feed.auxiliary for layer in made.layers.values()) * AUXILIARY / labels[step].numel() ** 2
            )
            (loss + (0.0 if fault == "no balance" else balance)).backward()
            _add_up(made, fault)
            optimizer.step()


def _add_up(made: nn.Module, fault: str) -> None:
    """Adds up what replicas share; experts have the gradients of all tokens already."""
    for name, parameter in made.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(parameter.grad)
        elif fault == "experts divided" and parameter.grad is not None:
            parameter.grad /= RANKS


def _exchange(experts: nn.ModuleDict, each: int) -> None:
    """The experts of the two ranks have each other's weights."""
    states = [{name: value.clone() for name, value in expert.state_dict().items()} for expert in experts.values()]
    for index, expert in enumerate(experts.values()):
        expert.load_state_dict(states[(index + each) % len(states)])
