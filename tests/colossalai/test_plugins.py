"""Plugins with replicas alone, and a Booster without a plugin: they train what one process trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from pipeflow.colossalai.accelerator import get_accelerator
from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads

BATCH = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


WHOLE = model()


def square(outputs: Tensor, inputs: Tensor) -> Tensor:
    return (outputs.double() - inputs).square().mean()


def trained(make: Callable[[], Booster], dtype: torch.dtype = torch.float64) -> tuple[list[float], list[Any], int]:
    """The losses of this replica's half of the batch, the weights then, and of how many there are states here."""
    booster = make()
    module = copy.deepcopy(WHOLE).to(dtype)
    made, optimizer, *_ = booster.boost(module, AdamW(module.parameters(), lr=0.05))
    mine, losses = BATCH.chunk(2)[current_context().data_rank], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = square(made(mine.to(dtype)), mine)
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    states = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return losses, [each.detach() for each in made.parameters()], states


def plain() -> tuple[list[float], list[Tensor]]:
    module = copy.deepcopy(WHOLE)
    optimizer, losses = AdamW(module.parameters(), lr=0.05), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = square(module(BATCH), BATCH)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [each.detach() for each in module.parameters()]


BOOSTERS: dict[str, Callable[[], Booster]] = {
    "none": Booster,
    "ddp": lambda: Booster(plugin=TorchDDPPlugin(bucket_cap_mb=25, static_graph=False)),
    "zero": lambda: Booster(plugin=LowLevelZeroPlugin(precision="fp32", norm_type=2.0, verbose=False)),
}


@pytest.mark.parametrize("name", BOOSTERS)
def test_replicas_train_what_one_process_trains(name: str) -> None:
    losses, weights = plain()
    results = run_threads(trained, 2, BOOSTERS[name], data=2)
    for step, loss in enumerate(losses):
        assert sum(found[step] for found, *_ in results) / 2 == pytest.approx(loss, rel=1e-9)
    for _, found, _ in results:
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-9)
    total = sum(each.numel() for each in weights)
    assert sum(states for *_, states in results) == (total if name == "zero" else 2 * total)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("named", [False, True], ids=["no plugin", "a plugin"])
def test_a_precision(precision: Literal["fp16", "bf16"], dtype: torch.dtype, named: bool) -> None:
    def make() -> Booster:
        booster = Booster(mixed_precision=precision, plugin=TorchDDPPlugin() if named else None)
        assert booster.plugin.half is not None
        return booster

    for losses, weights, _ in run_threads(trained, 2, make, torch.float32, data=2):
        assert {each.dtype for each in weights} == {dtype}
        assert losses[-1] < losses[0]


def test_the_stage_of_zero_is_passed_on() -> None:
    def rank() -> tuple[Any, ...]:
        plugin = LowLevelZeroPlugin(stage=2, initial_scale=2.0**5, max_norm=1.0)
        assert isinstance(plugin, HybridParallelPlugin)
        assert get_accelerator().get_current_device() == current_context().device
        given = plugin.settings
        return given.zero_stage, given.precision, given.initial_scale, given.max_norm, plugin.dp_size

    assert run_threads(rank, 2, data=2) == [(2, "fp16", 32.0, 1.0, 2)] * 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GeminiPlugin(initial_scale=2**5), r"wrap the model with colossalai\.nn\.parallel\.GeminiDDP"),
        (lambda: LowLevelZeroPlugin(stage=3), "stage must be 1 or 2, got 3"),
        (lambda: LowLevelZeroPlugin(norm_type=1.0), "LowLevelZeroPlugin does not support norm_type=1.0: max_norm is a"),
        (lambda: LowLevelZeroPlugin(norm_typ=1.0), "unknown option of LowLevelZeroPlugin 'norm_typ'"),
        (lambda: TorchDDPPlugin(static_graph=True), "does not support static_graph=True"),
        (lambda: TorchDDPPlugin(bucket_cap_mb=50), "does not support bucket_cap_mb=50: bucket sizes"),
        (lambda: Booster(device="cuda"), "remove device, since the launch chooses it"),
        (lambda: Booster(plugin=object()), "plugin must be a HybridParallelPlugin, got object"),  # type: ignore[arg-type]  # by mistake
        (
            lambda: Booster(plugin=HybridParallelPlugin(1, 1, precision="fp32"), mixed_precision="bf16"),
            "pass the precision to the plugin",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], said: str) -> None:
    def rank() -> None:
        with pytest.raises(UsageError, match=said):
            make()

    run_threads(rank, 2, data=2)
