"""GeminiDDP under each of its placement policies: it trains as the plain module, and a rank has its share of it."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from pipeflow.colossalai import gemini
from pipeflow.colossalai.nn.parallel import GeminiDDP
from pipeflow.colossalai.utils import get_current_device
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from tests.tensor.ranks import seeded

POLICIES = ("auto", "static", "cpu", "cuda")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        made: Tensor = self.head(x)
        return made


def model() -> Model:
    made: Model = seeded(Model).double()
    return made


def batch(part: int) -> Tensor:
    return torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(part))


def trained(policy: str) -> tuple[dict[str, Any], int, int]:
    """The weights after three steps, how many of them this rank has, and how many states its optimizer has."""
    made = GeminiDDP(model(), device=get_current_device(), placement_policy=policy, pin_memory=True, search_range_m=32)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        made(batch(current_context().data_rank)).square().mean().backward()
        optimizer.step()
    held = sum(_here(each).numel() for each in made.parameters())
    states = sum(_here(state["exp_avg"]).numel() for state in optimizer.state.values())
    weights = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().numpy().copy()
        for name, each in made.module.named_parameters()
    }
    return weights, held, states


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def under_each() -> list[Any]:
    return [trained(policy) for policy in POLICIES]


@pytest.mark.slow
def test_every_policy_trains_as_the_plain_module() -> None:
    plain = model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([plain(batch(part)).square().mean() for part in range(2)]).mean().backward()
        optimizer.step()
    total = sum(each.numel() for each in plain.parameters())
    shares = [0, 0, 0, 0]
    for results in run_processes(under_each, 2, data=2):
        for index, (weights, held, states) in enumerate(results):
            for name, weight in plain.named_parameters():
                assert numpy.allclose(weights[name], weight.detach().numpy(), rtol=1e-9, atol=1e-12), name
            assert held == states
            assert held < 0.6 * total
            shares[index] += held
    assert shares == [total] * 4


@pytest.mark.parametrize("pins", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_only_cpu_keeps_shards_in_the_memory_of_the_host(
    policy: str, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown on a second device; nothing is copied there."""
    told: list[Any] = []
    monkeypatch.setattr(gemini, "_mesh", lambda group, device: device)
    monkeypatch.setattr(gemini, "spread", lambda module, mesh, offload_policy: told.append(offload_policy))

    def rank() -> None:
        GeminiDDP(model(), device="meta", placement_policy=policy, pin_memory=pins)

    run_threads(rank, 2, data=2)
    wanted = CPUOffloadPolicy(pin_memory=pins) if policy == "cpu" else OffloadPolicy()
    assert told == [wanted] * 2


def test_a_pipeline_is_refused() -> None:
    """Its stages would wait for each other's shards."""

    def rank() -> None:
        with pytest.raises(UsageError, match="launch without pipeline="):
            GeminiDDP(model(), device="cpu")

    run_threads(rank, 2)


def test_another_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="placement_policy must be one of auto, static, cpu, cuda, got 'disk'"):
        GeminiDDP(model(), device="cpu", placement_policy="disk")
