"""Toy models with what models of other libraries do: equal to the plain module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.testing import run_threads
from tests.stages.compared import gradients_of

WIDTH = 4
FOUR = make_schedule("interleaved-1f1b", ranks=2, microbatches=2)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class TwoLists(nn.Module):
    """Most of its blocks are in an nn.Sequential, the last two in an nn.ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(linear() for _ in range(4)))
        self.last = nn.ModuleList(linear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        for block in self.last:
            x = block(x).tanh()
        return x


class Dropped(nn.Module):
    """Each block is skipped if a random number is at most 0, or if none of `probability` is drawn."""

    def __init__(self, probability: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(4))
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(1).item() <= self.probability:
                continue
            x = block(x).tanh()
        return x


class Kept(Dropped):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.bernoulli(torch.tensor(1 - self.probability)).item():
                x = block(x).tanh()
        return x


def loss(output: Tensor, _: Any) -> Tensor:
    return output.sin().mean()


def trained(module: nn.Module) -> list[str]:
    """Trains four stages for a step, compares them with the module itself, and returns the names of the cuts."""
    batch = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.zeros(4)

    def rank() -> tuple[dict[str, Tensor], list[str]]:
        model = Pipeline.from_module(copy.deepcopy(module), FOUR, batch, criterion=loss)
        execute_pipeline(iter([batch]), model)
        assert model.cut is not None
        return gradients_of(model), [cut.name for cut in model.cut.cuts]

    results = run_threads(rank, 2)
    for part in batch[0].chunk(2):
        (loss(module(part), None) / 2).backward()
    expected = gradients_of(module)
    for found, _ in results:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected.pop(name), rtol=1e-9, atol=1e-12)
    assert not expected
    cuts: list[str] = results[0][1]
    return cuts


def test_lists_of_another_kind_are_cut_if_one_kind_has_too_few_blocks() -> None:
    assert trained(TwoLists()) == ["blocks.0", "blocks.1", "blocks.3"]


def test_a_block_with_the_probability_0_is_not_dropped() -> None:
    trained(Dropped())


@pytest.mark.parametrize("kind", [Dropped, Kept])
def test_a_dropped_block_is_refused(kind: type[Dropped]) -> None:
    with pytest.raises(Exception, match="chooses by a random number which modules it calls"):
        trained(kind(0.5))


class Recurrent(nn.Module):
    """Its sequences are packed, so its LSTM runs as many steps as their lengths say."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return x


class Spread(nn.Module):
    """Makes a sequence of each sample. Packs it itself if there is an LSTM only."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear(), linear(), recurrent, linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.arange(1.0, 6, dtype=torch.float64)[:, None]
        for block in self.blocks:
            if isinstance(block, nn.LSTM):
                packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
                x, _ = nn.utils.rnn.pad_packed_sequence(block(packed)[0], batch_first=True)
            else:
                x = block(x).tanh()
        return x


def test_sequences_are_packed() -> None:
    trained(Spread(Recurrent()))


def test_a_packed_sequence_between_stages() -> None:
    trained(Spread(nn.LSTM(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)))
