"""Dropout's masks agree where the input does and differ where it is split; checkpoints replay them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import (
    ColumnParallelLinear,
    Dropout,
    RandomTracker,
    RowParallelLinear,
    checkpoint,
    current_tracker,
    manual_seed,
    set_tracker,
)
from pipeflow.testing import run_threads
from tests.tensor.ranks import backward, normal, on_ranks, seeded

ONES = torch.ones(64)


def masks() -> tuple[Tensor, Tensor]:
    manual_seed(5)
    return Dropout(0.5)(ONES), Dropout(0.5, parallel_input=True)(ONES)


def test_masks_agree_outside_and_differ_inside_of_split_regions() -> None:
    results = run_threads(masks, 8, tensor=2, data=2)
    shared, own = ([result[kind] for result in results] for kind in (0, 1))
    for first in range(8):
        for second in range(first):
            assert torch.equal(shared[first], shared[second]) == (first // 2 == second // 2)
            assert not torch.equal(own[first], own[second])
    for first, second in zip(results, run_threads(masks, 8, tensor=2, data=2), strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_a_mask_drops_and_scales() -> None:
    def rank() -> None:
        tracker = manual_seed(0)
        for p in (0.25, 1.0, 0.0):
            input = torch.ones(10_000, dtype=torch.float64)
            output, gradient = backward(Dropout(p), input, torch.ones_like(input))
            assert gradient is not None
            assert torch.equal(output, gradient)
            dropped = output == 0
            assert abs(float(dropped.double().mean()) - p) < 0.02
            assert bool((output[~dropped] == 1 / (1 - p or 1)).all())
        state = tracker.get_state()
        assert torch.equal(Dropout(0.5).eval()(ONES), ONES)
        assert torch.equal(tracker.get_state()["shared"], state["shared"])
        given = torch.ones(8)
        assert Dropout(0.5, inplace=True)(given) is given

    on_ranks(2, rank)


def test_the_state_can_be_kept() -> None:
    tracker = RandomTracker(3)
    state = tracker.get_state()
    first = torch.rand(4, generator=tracker.shared), torch.rand(4, generator=tracker.own)
    other = RandomTracker(9)
    other.set_state(state)
    assert torch.equal(torch.rand(4, generator=other.shared), first[0])
    assert torch.equal(torch.rand(4, generator=other.own), first[1])
    with pytest.raises(UsageError, match="own and shared"):
        tracker.set_state({"shared": state["shared"]})


def test_several_ranks_need_a_seed_and_one_does_not() -> None:
    def rank() -> None:
        assert current_tracker() is None
        with pytest.raises(UsageError, match="manual_seed"):
            Dropout(0.5)(ONES)

    on_ranks(2, rank)

    def alone() -> None:
        assert current_tracker() is None
        state = torch.get_rng_state()
        mine = Dropout(0.5)(ONES)
        torch.set_rng_state(state)
        assert torch.equal(mine, functional.dropout(ONES, 0.5))

    with torch.random.fork_rng():
        on_ranks(1, alone)
    with pytest.raises(UsageError, match="from 0 to 1"):
        Dropout(1.5)


class Perceptron(nn.Module):
    """With dropout both inside of the split region and outside of it."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            ColumnParallelLinear.from_native_module(up),
            Dropout(0.5, parallel_input=True),
            RowParallelLinear.from_native_module(down),
            Dropout(0.5),
        )

    def forward(self, input: Tensor, checkpointed: bool) -> Tensor:
        output: Tensor = checkpoint(self.inner, input) if checkpointed else self.inner(input)
        return output


@pytest.mark.parametrize(("size", "seeded_at"), [(1, None), (1, 5), (2, 5), (4, 5)])
def test_a_checkpoint_replays_its_masks(size: int, seeded_at: int | None) -> None:
    """The gradients are those without a checkpoint, and what is drawn later is not moved."""
    up, down = seeded(nn.Linear, 8, 16, dtype=torch.float64), seeded(nn.Linear, 16, 8, dtype=torch.float64)

    def rank() -> None:
        found = []
        for checkpointed in (False, True):
            torch.manual_seed(0) if seeded_at is None else manual_seed(seeded_at)
            model = Perceptron(up, down)
            first, second = normal(3, 8).requires_grad_(), normal(3, 8, seed=1).requires_grad_()
            outputs = [model(first, checkpointed), model(second, checkpointed)]
            (outputs[0].sum() + outputs[1].pow(2).sum()).backward()
            of_weights = [parameter.grad for parameter in model.parameters()]
            found.append([*outputs, first.grad, second.grad, *of_weights, Dropout(0.5)(ONES)])
        assert int(found[0][0].count_nonzero()) not in (0, 24)
        for plain, replayed in zip(*found, strict=True):
            assert torch.equal(plain, replayed)

    with torch.random.fork_rng():
        on_ranks(size, rank)


def test_a_tracker_of_ones_own() -> None:
    def rank() -> None:
        tracker = RandomTracker(1, place=(0, 0, current_context().rank))
        set_tracker(tracker)
        assert current_tracker() is tracker
        assert torch.equal(Dropout(0.5)(ONES), 2.0 * torch.empty(64).bernoulli_(0.5, generator=RandomTracker(1).shared))

    on_ranks(2, rank)
