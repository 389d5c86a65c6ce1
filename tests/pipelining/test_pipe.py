"""Traced models: tensors pass to stages further on, and weights that several stages hold stay tied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeflow import UsageError
from pipeflow.adapters.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from pipeflow.pipelining import pipe_split, pipeline
from pipeflow.testing import run_processes
from tests.pipelining.work import CPU, TOLERANCE, difference, mean_loss, together

pytestmark = pytest.mark.slow
WORDS, WIDTH, STAGES = 11, 6, 4


class Skipping(nn.Module):
    """A language model with a skip connection over all stages, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        value = self.embed(words)
        skip, value = value, torch.tanh(self.first(value))
        pipe_split()
        value = self.second(value)
        pipe_split()
        value = torch.tanh(self.third(value))
        pipe_split()
        output: Tensor = self.head(value + skip) * mask
        return output


def train(name: str) -> tuple[float, float | None]:
    """The error of gradients, and of the loss where it is known. The last stage needs the batch's mask."""
    model = Skipping().double()
    whole = copy.deepcopy(model)
    words, mask = torch.randint(0, WORDS, (8, 5)), torch.rand(8, 5, 1).double()
    targets = torch.randn(8, 5, WORDS).double()
    loss = mean_loss(whole(words, mask), targets)
    loss.backward()
    pipe, kind = pipeline(model, (words[:2], mask[:2])), get_schedule_class(name)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    holders = [0, 1, 1, 0] if name == "ZBVZeroBubble" else [stage % ranks for stage in range(STAGES)]
    own = [stage for stage in range(STAGES) if holders[stage] == rank]
    stages = [pipe.build_stage(stage, CPU) for stage in own]
    schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], 4, loss_fn=mean_loss)
    losses: list[Tensor] = []
    args, kwargs = ((words,), {"mask": mask}) if 0 in own else ((), {})
    schedule.step(*args, target=targets if STAGES - 1 in own else None, losses=losses, **kwargs)
    expected: dict[str, Any] = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False)}
    held = [pair for stage in stages for pair in stage.submod.named_parameters()]
    errors = [difference(each.grad, expected[name]) for name, each in held]
    return max(errors), abs(together(losses) - loss.item()) if losses else None


@pytest.mark.parametrize(("name", "ranks"), [("1F1B", 4), ("ZBVZeroBubble", 2), ("Interleaved1F1B", 2)])
def test_skips_and_tied_weights_train(name: str, ranks: int) -> None:
    found = run_processes(train, ranks, name)
    assert max(error for error, _ in found) < TOLERANCE
    assert [loss for _, loss in found if loss is not None] == pytest.approx([0], abs=TOLERANCE)


class Masked(nn.Module):
    """Two inputs and one stage."""

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        return value * mask


def forget() -> str:
    """The error of a step without an input."""
    value, mask = torch.ones(2, WIDTH), torch.ones(2, WIDTH)
    schedule = get_schedule_class("GPipe")(pipeline(Masked(), (value, mask)).build_stage(0, CPU), 1)
    with pytest.raises(UsageError) as caught:
        schedule.step(value)
    return str(caught.value)


@pytest.mark.exhaustive
def test_an_input_that_is_missing_is_named() -> None:
    assert "the model's input 'mask' is missing" in run_processes(forget, 1)[0]
