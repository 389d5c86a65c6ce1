"""Weights that lead only to values which later stages did not use have no gradient, as in plain torch, so optimizers
leave them alone.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, Schedule, Whole, execute_pipeline, make_schedule, with_optimizer_step
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.program.slots import Unused, is_marked, to_message
from pipeflow.optim import PipelinedOptimizer
from pipeflow.testing import run_processes, run_threads
from tests.runtime import kinds

WIDTH = 4
Batch = tuple[tuple[Tensor, Whole], Tensor]


class Sides(nn.Module):
    """A chain of blocks. Values go past them to later blocks, which use those whose bit is in `uses`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.early, self.late = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.shared = nn.Linear(WIDTH, WIDTH)  # the first and the last stage use it
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor, uses: Tensor) -> Tensor:
        found = int(uses)
        hidden = self.first(inputs)
        early, late = self.early(hidden), self.late(self.shared(hidden))
        for index, block in enumerate(self.blocks):
            hidden = torch.tanh(block(hidden.detach() if found & 8 and index == 6 else hidden))
            if index == 5 and found & 1:
                hidden = hidden + early
        if found & 2:
            hidden = hidden + late
        if found & 4:
            hidden = hidden + self.shared(hidden)
        output: Tensor = self.head(hidden)
        return output


def batches_of(uses: list[int]) -> list[Batch]:
    """A batch for each."""
    make = torch.Generator().manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randn(12, width, dtype=torch.float64, generator=make)

    return [((draw(WIDTH), Whole(torch.tensor(each))), draw(1)) for each in uses]


@cache
def made() -> Sides:
    torch.manual_seed(0)
    return Sides().double()


USES = [7, 0, 1, 8, 2, 4, 15, 0, 9, 3] * 2
"""What is used in each step of a training."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def trained_plainly(uses: list[list[int]]) -> tuple[dict[str, Tensor], list[set[str]]]:
    """The weights after training with a list of what is used for each replica, and the names with a gradient in each
    step.
    """
    model, there = copy.deepcopy(made()), []
    optimizer = adamw(model.parameters())
    for batches in zip(*map(batches_of, uses), strict=True):
        optimizer.zero_grad()
        for (inputs, found), labels in batches:
            (nn.functional.mse_loss(model(inputs, found.value), labels) / len(uses)).backward()
        there.append({name for name, each in model.named_parameters() if each.grad is not None})
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}, there


def trained(schedule: Schedule, uses: list[list[int]]) -> tuple[dict[str, Tensor], list[set[str]]]:
    batches = batches_of(uses[current_context().data_rank])
    model = Pipeline.from_module(copy.deepcopy(made()), schedule, example=batches_of([7])[0], criterion=nn.MSELoss())
    optimizer, there = adamw(model.parameters()), []
    steps = kinds.steps_optimizer(schedule)
    pipelined = PipelinedOptimizer(model, optimizer, non_finite="ignore") if steps else None
    for batch in batches:
        if pipelined is None:
            optimizer.zero_grad()
        execute_pipeline(iter([batch]), model)
        if pipelined is None:
            there.append({name for name, each in model.named_parameters() if each.grad is not None})
            optimizer.step()
    if pipelined is not None:
        pipelined.confirm()
    return {name: each.detach() for name, each in model.named_parameters()}, there


def require_plain(schedule: Schedule, uses: list[list[int]]) -> None:
    """Weights and gradients that are None are those of plain torch, on each rank."""
    weights, there = trained_plainly(uses)
    for found, has in run_threads(trained, schedule.placement.num_ranks * len(uses), schedule, uses, data=len(uses)):
        for name, weight in found.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-12, atol=1e-12, msg=name)
        for step, names in enumerate(has):
            assert names == there[step] & found.keys(), step


ONE = make_schedule("1f1b", ranks=2, microbatches=4)
CHUNKS = make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=2)
SPLIT = make_schedule("zb-h1", ranks=3, microbatches=4)
CASES = {
    "neighbours": (ONE, 1),
    "chunks, moved and recomputed": (kinds.with_kinds(CHUNKS, kinds.MIXED), 1),
    "split backwards": (SPLIT, 1),
    "two copies of a stage": (make_schedule("dualpipe", ranks=2, microbatches=4), 1),
    "the optimizer's step": (with_optimizer_step(make_schedule("zb-h2", ranks=2, microbatches=4)), 1),
    "replicas": (ONE, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_plain_torch(case: str) -> None:
    made()  # threads share torch's generator
    schedule, data = CASES[case]
    require_plain(schedule, [USES, [*USES[1:], 0]][:data])


def test_one_step() -> None:
    made()
    for uses in (0, 8):
        require_plain(ONE, [[7, uses]])


@pytest.mark.exhaustive
def test_between_processes() -> None:
    """The step in which nothing before the sixth block has a gradient."""
    expected = trained_plainly([USES[:8]])[1]
    for names, has in run_processes(names_with_gradients, 2):
        assert has == [each & names for each in expected]


def names_with_gradients() -> tuple[set[str], list[set[str]]]:
    weights, has = trained(ONE, [USES[:8]])
    return set(weights), has


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_messages(dtype: torch.dtype) -> None:
    value = torch.ones(2, 3, dtype=dtype)
    message = to_message(Unused.of(value))
    assert type(message) is Tensor
    assert message.is_contiguous()
    assert (message.shape, message.dtype) == (value.shape, dtype)
    assert is_marked(message)
    assert torch.equal(Unused.of(message).zeros(), torch.zeros_like(value))
    for gradient in (value, torch.full_like(value, torch.nan), torch.zeros_like(value)):
        assert not is_marked(gradient)
    same_bits = message.clone()  # a gradient all the same
    assert is_marked(same_bits)
    assert not is_marked(to_message(same_bits))
    assert to_message(same_bits).isnan().flatten()[0]


def test_a_message_without_entries() -> None:
    empty = torch.ones(0, 3)
    message = to_message(Unused.of(empty))
    assert message.shape == empty.shape
    assert not is_marked(message)
