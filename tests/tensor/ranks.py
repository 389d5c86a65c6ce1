"""What tests of tensor-parallel layers need: layers beside their stock counterparts, and groups that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.parallel.transport.protocol import Group, Work
from pipeflow.engine.tensor.layer import TensorLayer, cut
from pipeflow.engine.tensor.regions import gathered
from pipeflow.testing import run_threads

SIZES = (1, 2, 4)
_ONE_AT_A_TIME = RLock()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def indices(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[..., Any], *arguments: Any, seed: int = 0, **options: Any) -> Any:
    """What `make` gives when torch's default generator starts at `seed`; threads share it, so one at a time uses it."""
    with _ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(*arguments, **options)


@dataclass(frozen=True)
class Place:
    """A group that only says where a rank is; nothing can be exchanged."""

    rank: int
    size: int


class Counting:
    """A group that counts its collectives, and notes what happened in which order."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.inner = group
        self.counts: Counter[str] = Counter()
        self.events: list[str] = []

    def connect(self) -> None:
        self.inner.connect()

    def __getattr__(self, name: str) -> Callable[..., Work]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Work:
            self.counts[name] += 1
            self.events.append(f"{name} starts")
            return _Noted(self, name, getattr(self.inner, name)(*arguments))

        return call

    def taken(self) -> dict[str, int]:
        """The counts since the last call."""
        counts = dict(self.counts)
        self.counts.clear()
        return counts


class _Noted:
    def __init__(self, group: Counting, name: str, work: Work) -> None:
        self.group, self.name, self.work = group, name, work

    def wait(self) -> None:
        self.group.events.append(f"{self.name} is waited for")
        self.work.wait()


def backward(module: nn.Module, input: Tensor, gradient: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The output, and the gradient of a copy of the input."""
    input = input.clone().requires_grad_(input.is_floating_point() or input.is_complex())
    output = module(input)
    output.backward(normal(*output.shape, seed=9, dtype=output.dtype) if gradient is None else gradient)
    return output.detach(), input.grad


def require_near(mine: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12) -> None:
    if theirs is None:
        assert mine is None
    else:
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def require_parts(layer: nn.Module, native: nn.Module, tolerance: float = 1e-12) -> None:
    """The parameters' gradients are this rank's parts of those of the stock layer."""
    group, splits = current_context().tensor, layer.splits() if isinstance(layer, TensorLayer) else {}
    for name, whole in native.named_parameters():
        assert whole.grad is not None
        require_near(layer.get_parameter(name).grad, cut(whole.grad, splits.get(name), group), tolerance)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function` on `size` tensor ranks, threads of this process."""
    return run_threads(function, size, *arguments, tensor=size)


def joined(parts: Tensor, dim: int = -1) -> Tensor:
    """Every rank's `parts` along `dim`."""
    group = current_context().tensor
    return parts if group.size == 1 else gathered(group, parts, dim)


def mine(whole: Tensor, dim: int = -1) -> Tensor:
    """This rank's piece of `whole`."""
    group = current_context().tensor
    return whole.chunk(group.size, dim)[group.rank].contiguous()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's gradients by name, put together where tensor ranks have parts of them."""
    context, splits, found = current_context(), splits_of(module), {}
    for name, parameter in module.named_parameters():
        if (gradient := parameter.grad) is not None:
            if (split := splits.get(id(parameter))) is not None:
                parts = gradient.new_empty(context.tensor_size * gradient.shape[0], *gradient.shape[1:])
                context.tensor.all_gather(parts, gradient.contiguous()).wait()
                gradient = split.joined(parts.chunk(context.tensor_size))
            found[name] = gradient.clone()
    return found
