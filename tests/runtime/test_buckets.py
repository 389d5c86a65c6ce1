"""Gradients that are summed lie in one row of memory, whatever a user does with `.grad` between the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads


class Net(nn.Module):
    """A convolution, a product and a scale. If it is `mixed`, one weight is in channels_last, and no output needs
    another one, so not all gradients lie in a row.
    """

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.scale, self.weight, self.kernel = drawn(4), drawn(4, 8), drawn(2, 3, 2, 2)
        if mixed:
            self.kernel = nn.Parameter(self.kernel.data.to(memory_format=torch.channels_last))
            self.unused = drawn(3)

    def forward(self, images: Tensor) -> Tensor:
        seen = nn.functional.conv2d(images, self.kernel)
        found: Tensor = nn.functional.linear(seen.flatten(1), self.weight) * self.scale
        return found


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * replica + step)
    return (
        torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64),
        torch.randn(4, 4, generator=generator, dtype=torch.float64),
    )


def criterion(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, labels)


def nothing(_: nn.Module) -> None:
    pass


def clear(module: nn.Module) -> None:
    module.zero_grad()


def zero(module: nn.Module) -> None:
    module.zero_grad(set_to_none=False)


def clear_one(module: nn.Module) -> None:
    module.get_parameter("weight").grad = None


def replace(module: nn.Module) -> None:
    weight = module.get_parameter("weight")
    assert weight.grad is not None
    weight.grad = 3 * weight.grad


def scale(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def change_memory(module: nn.Module) -> None:
    """As conversions of a module do, which keep the gradient's object."""
    weight = module.get_parameter("weight")
    assert weight.grad is not None
    weight.grad.data = weight.grad.data.clone()


def freeze(module: nn.Module) -> None:
    module.get_parameter("scale").requires_grad_(False)


Act = Callable[[nn.Module], None]
ACTS: list[Act] = [nothing, clear, zero, clear_one, replace, scale, change_memory, freeze]


def gradients_of(module: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.numpy().copy() for name, p in module.named_parameters()}


def train(act: Act, mixed: bool) -> tuple[dict[str, Any], list[bool]]:
    """The gradients after three steps with `act` between them; and whether `.grad` had memory of their own."""
    module = Net(mixed)
    pipeline = Pipeline(module, make_schedule("1f1b", ranks=1, microbatches=2), criterion=criterion)
    for step in range(3):
        if step:
            act(module)
        execute_pipeline(iter([batch(current_context().data_rank, step)]), pipeline)
    rows = [p.grad.untyped_storage().data_ptr() for p in (module.weight, module.scale) if p.grad is not None]
    return gradients_of(module), [len(set(rows)) == 1, module.kernel.grad.stride() == module.kernel.stride()]  # type: ignore[union-attr]  # it has one


def plain(act: Act, mixed: bool, replicas: int) -> dict[str, Any]:
    """What one process adds up."""
    module = Net(mixed)
    for step in range(3):
        if step:
            act(module)
        for replica in range(replicas):
            inputs, labels = batch(replica, step)
            (criterion(module(inputs), labels) / replicas).backward()
    return gradients_of(module)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_what_a_user_does_between_steps_is_kept(act: Act, mixed: bool) -> None:
    expected = plain(act, mixed, 2)
    for gradients, facts in run_threads(train, 2, act, mixed, data=2):
        for name, wanted in expected.items():
            assert gradients[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-12)), name
        assert facts == [act is not freeze, True]


def rows() -> list[bool]:
    """Whether the second step sums in the memory of the first: with its gradients, with others, and without."""
    module, found = Net(mixed=False), []
    pipeline = Pipeline(module, make_schedule("1f1b", ranks=1, microbatches=2), criterion=criterion)
    for act in (clear, zero, replace):
        if module.weight.grad is not None:
            act(module)
        before = module.scale.grad
        execute_pipeline(iter([batch(current_context().data_rank, 0)]), pipeline)
        found.append(module.scale.grad is before)
    return found


def test_a_row_lives_as_long_as_its_gradients_do() -> None:
    assert run_threads(rows, 2, data=2) == [[False, True, False]] * 2
