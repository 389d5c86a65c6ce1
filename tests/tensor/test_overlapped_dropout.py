"""Dropout that a backward computes again while a forward runs beside it, on another thread: the same masks, or an
error that says what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline
from pipeflow.engine.runtime.program.pairs import Half, Overlap
from pipeflow.tensor import Dropout, checkpoint, manual_seed
from pipeflow.testing import run_threads
from pipeflow.testing.models import LayersStage, PlainModel
from tests.runtime.work import Gradients, build, gradients_of

Recompute = Callable[..., Any]
PAIRS = ",".join(f"(0F{number + 1};0B{number})OVERLAP_F_B" for number in range(15))
PAIRED = Schedule.from_csv(f"0F0,{PAIRS},0B15", name="paired")
torchs: Recompute = partial(torch_checkpoint.checkpoint, use_reentrant=False)


def kept(function: Callable[..., Any], hidden: Tensor) -> Any:
    return function(hidden)


@dataclass(frozen=True)
class Dropping(PlainModel):
    """Layers with dropout, computed again by `recompute`."""

    dropout: Callable[[float], nn.Module] = Dropout
    recompute: Recompute = checkpoint

    def stage(self, start: int, end: int) -> nn.Module:
        return DroppingStage(self, start, end)


class DroppingStage(LayersStage):
    def __init__(self, model: Dropping, start: int, end: int) -> None:
        super().__init__(model, start, end)
        self.dropout, self.recompute = model.dropout(0.5), model.recompute

    def run(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers.values():
            hidden = self.dropout(layer(hidden))
        return hidden

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.recompute(self.run, hidden)
        return output


def at_once(forward: Half, backward: Half) -> None:
    threads = [Thread(target=half) for half in (forward, backward)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_after_the_other(forward: Half, backward: Half) -> None:
    """On two threads, of which the second may have the number of the first."""
    for half in (forward, backward):
        thread = Thread(target=half)
        thread.start()
        thread.join()


def in_turn(forward: Half, backward: Half) -> None:
    forward()
    backward()


def step(model: Dropping, overlap: Overlap | None, seed: int | None) -> Gradients:
    torch.manual_seed(0)
    if seed is not None:
        manual_seed(seed)
    pipeline = build(model, PAIRED, overlap=overlap)
    execute_pipeline(iter([model.batch(32)]), pipeline)
    return gradients_of(pipeline)


def run(model: Dropping, overlap: Overlap | None, seed: int | None = None) -> Gradients:
    with torch.random.fork_rng():
        [gradients] = run_threads(step, 1, model, overlap, seed)
    return dict(gradients)


@pytest.mark.parametrize("overlap", [None, in_turn, at_once])
def test_a_recompute_beside_a_forward_has_the_masks_of_its_own(overlap: Overlap | None) -> None:
    expected = run(Dropping(recompute=kept), None, seed=5)
    found = run(Dropping(), overlap, seed=5)
    for name, gradient in expected.items():
        assert gradient == pytest.approx(found[name], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("recompute", [checkpoint, torchs])
def test_torchs_generator_in_a_recompute_on_another_thread_is_refused(recompute: Recompute) -> None:
    """It is one for all threads: what is drawn beside it would move the masks."""

    def refused() -> None:
        pipeline = build(model, PAIRED, overlap=at_once)
        with pytest.raises(UsageError, match=r"drew from torch's own generator.*pipeflow\.tensor\.Dropout"):
            execute_pipeline(iter([model.batch(32)]), pipeline)

    model = Dropping(dropout=nn.Dropout, recompute=recompute)
    run_threads(refused, 1)
    expected = run(Dropping(dropout=nn.Dropout, recompute=kept), None)
    for name, gradient in run(model, in_turn).items():
        assert gradient == pytest.approx(expected[name], rel=1e-12, abs=1e-12)
    run(Dropping(dropout=nn.Dropout, recompute=kept), at_once)


def switch_on(pipeline: Pipeline) -> None:
    for module in pipeline.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


def test_a_dropout_that_is_switched_on_later_is_refused_then() -> None:
    def refused(start: Callable[[Pipeline], object], switch: Callable[[Pipeline], object]) -> None:
        pipeline = build(model, PAIRED, overlap=at_once)
        start(pipeline)
        execute_pipeline(iter([model.batch(32)]), pipeline)
        switch(pipeline)
        with pytest.raises(UsageError, match=r"drew from torch's own generator"):
            execute_pipeline(iter([model.batch(32)]), pipeline)

    model = Dropping(dropout=lambda _: nn.Dropout(0.0), recompute=torchs)
    run_threads(refused, 1, lambda _: None, switch_on)
    model = Dropping(dropout=nn.Dropout, recompute=torchs)
    run_threads(refused, 1, Pipeline.eval, Pipeline.train)


def test_an_overlap_that_uses_another_thread_later_is_refused_then() -> None:
    """Though its pairs were on one thread when their draws were seen."""

    def refused() -> None:
        overlaps = [in_turn]
        pipeline = build(model, PAIRED, overlap=lambda forward, backward: overlaps[-1](forward, backward))
        for _ in range(2):
            execute_pipeline(iter([model.batch(32)]), pipeline)
        overlaps.append(one_after_the_other)
        with pytest.raises(UsageError, match=r"drew from torch's own generator"):
            execute_pipeline(iter([model.batch(32)]), pipeline)

    model = Dropping(dropout=nn.Dropout, recompute=torchs)
    run_threads(refused, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_does_not_replay_a_tracker_and_is_refused(reentrant: bool) -> None:
    def refused() -> None:
        manual_seed(5)
        dropout, input = Dropout(0.5), torch.ones(8, requires_grad=True)
        dropout(input).sum().backward()
        output = torch_checkpoint.checkpoint(dropout, input, use_reentrant=reentrant)
        with pytest.raises(UsageError, match=r"Dropout .* use pipeflow\.tensor\.checkpoint"):
            output.sum().backward()

    run_threads(refused, 1)
