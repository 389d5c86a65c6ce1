"""Blocks within one custom autograd.Function, as reversible models have them: gradients do not flow between the blocks,
so a forward is cut outside of it only. And functions that compute gradients of parameters in their backward.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.testing import run_threads
from tests.runtime.work import plain
from tests.stages.chain import chained
from tests.stages.models import WIDTH, seeded, vectors


class Reversible(torch.autograd.Function):
    """Keeps only the last output, and computes the blocks' inputs again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, blocks: Any) -> Tensor:
        ctx.blocks = blocks
        for block in blocks:
            values = block(values)
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (values,) = ctx.saved_tensors
        for block in reversed(ctx.blocks):
            values, gradient = block.back(values, gradient)
        return gradient, None


class Block(nn.Module):
    """Adds to one half of its input a function of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, values: Tensor) -> Tensor:
        one, two = values.chunk(2, -1)
        return torch.cat([two, one + torch.tanh(self.layer(two))], -1)

    def back(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        two, total = values.chunk(2, -1)
        with torch.enable_grad():
            two = two.detach().requires_grad_()
            added = torch.tanh(self.layer(two))
            torch.autograd.backward(added, gradient[:, WIDTH // 2 :])
        assert two.grad is not None
        one = (total - added).detach()
        before = torch.cat([gradient[:, WIDTH // 2 :], gradient[:, : WIDTH // 2] + two.grad], -1)
        return torch.cat([one, two.detach()], -1), before


class Keeping(Block):
    """Keeps its last mean for the backward, as reversible blocks keep the state of their random numbers."""

    def forward(self, values: Tensor) -> Tensor:
        self.mean = values.detach().mean()
        return super().forward(values)


class Model(nn.Module):
    """Reversible blocks; layers around them, if any, are in an nn.Sequential."""

    def __init__(self, tail: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if tail else nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        loss: Tensor = self.tail(Reversible.apply(self.embed(values), self.blocks)).square().mean()  # type: ignore[no-untyped-call]
        return loss


@pytest.mark.parametrize(
    ("tail", "options", "cut"),
    [(True, {}, "tail.0"), (False, {"cuts": ["embed"]}, "embed"), (False, {"blocks": ["embed", "tail"]}, "embed")],
)
def test_it_is_cut_outside_of_the_function(tail: bool, options: dict[str, Any], cut: str) -> None:
    module, values = seeded(Model(tail).double(), 0), vectors(5)[0]
    loss, plan = chained(module, {"values": values}, 2, **options)
    assert [call.name for call in plan.cuts] == [cut]
    loss.backward()
    found = {name: each.grad for name, each in module.named_parameters()}
    whole = seeded(Model(tail).double(), 0)
    whole(values).backward()
    for name, parameter in whole.named_parameters():
        gradient = found[name]
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("options", [{}, {"cuts": ["blocks.1"]}, {"blocks": "Block"}])
def test_a_cut_within_the_function_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"blocks\.\d is called within Reversible, a custom autograd.Function whose"):
        chained(seeded(Model(tail=False).double(), 0), {"values": vectors(5)[0]}, 2, **options)


class OfContext(Reversible):
    """With a context of its own, and a decorator."""

    @staticmethod
    @torch.no_grad()
    def forward(values: Tensor, blocks: Any) -> Tensor:  # type: ignore[override]
        for block in blocks:
            values = block(values)
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.blocks = inputs[1]
        ctx.save_for_backward(output)


EARLY = OfContext.apply


def test_a_function_is_found_whatever_its_style(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `setup_context`, decorated, and with an `apply` that was looked up before."""
    monkeypatch.setattr(Reversible, "apply", EARLY)
    with pytest.raises(UsageError, match=r"blocks\.\d is called within OfContext, a custom autograd.Function whose"):
        chained(seeded(Model(tail=False).double(), 0), {"values": vectors(5)[0]}, 2, cuts=["blocks.1"])


def warned(caplog: pytest.LogCaptureFixture, block: type[nn.Module], microbatches: int) -> list[str]:
    module, values = Model(tail=True), torch.randn(8, WIDTH)
    module.blocks = nn.ModuleList(block() for _ in range(2))
    run_threads(gradients_in_ranks, 2, module, "1f1b", {"values": values}, microbatches)
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_tensor_that_a_block_keeps_for_its_backward_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    [said] = warned(caplog, Keeping, 4)
    assert said.startswith("blocks.0, which a custom autograd.Function calls, keeps a tensor in its attribute 'mean'")
    assert warned(caplog, Keeping, 1) == warned(caplog, Block, 4) == []


class Recomputed(torch.autograd.Function):
    """A checkpoint as diffusion models have it: it asks for the gradients of the layer's parameters, too."""

    @staticmethod
    def forward(ctx: Any, layer: Any, values: Tensor, *parameters: Tensor) -> Any:
        ctx.layer, ctx.inputs = layer, (values, *parameters)
        with torch.no_grad():
            return layer(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, *parameters = ctx.inputs
        with torch.enable_grad():
            values = values.detach().requires_grad_()
            output = ctx.layer(values)
        return None, *torch.autograd.grad(output, [values, *parameters], gradient)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return torch.tanh(Recomputed.apply(self.layer, values, *self.layer.parameters()))  # type: ignore[no-untyped-call]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Checkpointed() for _ in range(8)))

    def forward(self, values: Tensor) -> Tensor:
        loss: Tensor = self.blocks(values).square().mean()
        return loss


def gradients_in_ranks(
    module: nn.Module, schedule: str, batch: dict[str, Tensor], microbatches: int = 4
) -> dict[str, Any]:
    order = make_schedule(schedule, ranks=2, microbatches=microbatches)
    model = Pipeline.from_module(copy.deepcopy(module), order, batch)
    execute_pipeline(iter([batch]), model)
    return {name: plain(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_function_may_ask_for_gradients_of_parameters(schedule: str) -> None:
    module, values = seeded(Mean().double(), 0), torch.randn(8, WIDTH, dtype=torch.float64)
    for part in values.chunk(4):
        (module(part) / 4).backward()
    expected = {name: plain(parameter.grad) for name, parameter in module.named_parameters()}
    module.zero_grad()
    first, second = run_threads(gradients_in_ranks, 2, module, schedule, {"values": values})
    assert (first | second).keys() == expected.keys()
    for name, gradient in (first | second).items():
        assert numpy.allclose(gradient, expected[name], rtol=1e-9, atol=1e-15), name
