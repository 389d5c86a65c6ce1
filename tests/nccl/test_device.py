"""The pretended GPU computes as the CPU does, and a Watch sees each time the host would wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.nccl.device import DEVICE, OnDevice, Watch, moved, pretended


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """Why the host waited."""
    why: list[str] = []
    with pretended(), Watch(lambda: None, why.append):
        yield why


def there() -> Tensor:
    return torch.ones(3, device=DEVICE)


WAITING: dict[str, Callable[[], object]] = {
    "item": lambda: there().sum().item(),
    "float": lambda: float(there()[0]),
    "bool": lambda: bool(there().isfinite().all()),
    "format": lambda: f"{there().sum():.3f}",
    "repr": lambda: repr(there()),
    "tolist": lambda: there().tolist(),
    "cpu": lambda: there().cpu(),
    "to": lambda: there().to("cpu", torch.float64),
    "to by name": lambda: there().to(device=torch.device("cpu")),
    "made from numbers": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
    "from the CPU": lambda: torch.ones(3).to(DEVICE),
    "copied from": lambda: torch.zeros(3).copy_(there()),
    "copied from without waiting": lambda: torch.zeros(3).copy_(there(), non_blocking=True),
    "copied to": lambda: there().copy_(torch.zeros(3)),
    "written into": lambda: torch.zeros(3).__setitem__(0, there()[0]),
    "nonzero": lambda: there().nonzero(),
    "a mask": lambda: there()[there() > 0],
    "a list of indices": lambda: there()[[0, 1]],
    "equal": lambda: torch.equal(there(), there()),
    "synchronize": lambda: torch.cuda.synchronize(),  # that of the pretended GPU
}


@pytest.mark.parametrize("name", WAITING)
def test_the_host_waits_once(name: str, seen: list[str]) -> None:
    WAITING[name]()
    assert len(seen) == 1, seen


NOT_WAITING: dict[str, Callable[[], object]] = {
    "made": lambda: torch.full((2,), 3.0, device=DEVICE),
    "without waiting": lambda: torch.ones(3).to(DEVICE, non_blocking=True),
    "products": lambda: (there() @ there()).sqrt().add_(1.0),
    "slices": lambda: torch.cat([there()[1:], there().view(3, 1)[:, 0]]),
    "other dtypes": lambda: there().to(torch.float64).to(DEVICE),
    "on the CPU": lambda: torch.ones(3).tolist(),
}


@pytest.mark.parametrize("name", NOT_WAITING)
def test_the_host_does_not_wait(name: str, seen: list[str]) -> None:
    NOT_WAITING[name]()
    assert not seen


def test_it_trains_as_the_cpu_does(seen: list[str]) -> None:
    modules: list[nn.Module] = []
    for is_there in (True, False):
        torch.manual_seed(0)
        module: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        module = moved(module) if is_there else module
        inputs = torch.ones(5, 3).to(next(module.parameters()).device, non_blocking=True)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        for _ in range(2):
            module(inputs).pow(2).mean().backward()
            optimizer.step()
        modules.append(module)
    assert not seen
    for here, plain in zip(*(module.parameters() for module in modules), strict=True):
        assert isinstance(here, OnDevice)
        assert here.device == DEVICE
        assert torch.equal(here.detach().cpu(), plain)


def test_tensors_of_two_devices_do_not_mix(seen: list[str]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        there() + torch.ones(3)
    assert torch.equal((there() + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))
    with pytest.raises(TypeError, match="numpy"):
        there().numpy()
