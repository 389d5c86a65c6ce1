"""What tests of deferring layers need: layers with inputs, and backwards run whole or in halves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipeflow.engine.deferral.module import Deferral, defer_weight_gradients
from pipeflow.engine.deferral.products import Deferred, Queue, run_products


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Case:
    """A layer, and inputs for it."""

    name: str
    make: Callable[[], nn.Module]
    input: Callable[[], Tensor]

    def __str__(self) -> str:
        return self.name

    def module(self, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make().to(dtype)

    def inputs(self, dtype: torch.dtype) -> Tensor:
        input = self.input()
        return input.to(dtype).requires_grad_() if input.is_floating_point() else input


def linear(name: str, input: Callable[[], Tensor], **options: Any) -> Case:
    return Case(f"linear-{name}", lambda: nn.Linear(5, 4, **options), input)


def laid_out_by_columns() -> nn.Module:
    layer = nn.Linear(5, 4)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


def conv(dimensions: int, name: str, *shape: int, **options: Any) -> Case:
    layer = nn.Conv1d if dimensions == 1 else nn.Conv2d
    shape = shape or (3, 4, *(9, 8)[:dimensions])
    return Case(f"conv{dimensions}d-{name}", lambda: layer(4, 6, 3, **options), lambda: normal(*shape))


def embedding(name: str, **options: Any) -> Case:
    return Case(
        f"embedding-{name}", lambda: nn.Embedding(7, 5, **options), lambda: torch.tensor([[1, 2, 2], [0, 6, 1]])
    )


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without-bias": {"bias": False},
    "stride-and-padding": {"stride": 2, "padding": 2},
    "dilated": {"dilation": 2, "groups": 2},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": "same", "padding_mode": "reflect"},
}


def in_channels_last() -> nn.Module:
    layer: Any = nn.Conv2d(4, 6, 3)  # torch's annotations lack this form of `to`
    moved: nn.Module = layer.to(memory_format=torch.channels_last)
    return moved


CASES = [
    linear("vector", lambda: normal(5)),
    linear("matrix", lambda: normal(3, 5)),
    linear("long", lambda: normal(600, 5)),
    linear("strided", lambda: normal(2, 300, 10)[..., ::2]),
    linear("4d", lambda: normal(2, 3, 2, 5)),
    linear("without-bias", lambda: normal(2, 3, 5), bias=False),
    linear("transposed", lambda: normal(5, 3, 2).transpose(0, 2)),
    linear("of-nothing", lambda: normal(0, 5)),
    Case("linear-by-columns", laid_out_by_columns, lambda: normal(3, 5)),
    *(conv(d, name, **options) for d in (1, 2) for name, options in CONVOLUTIONS.items()),
    conv(1, "batchless", 4, 9, padding=1),
    conv(2, "batchless", 4, 9, 8, padding=(2, 1)),
    Case("conv2d-uneven", lambda: nn.Conv2d(4, 6, (2, 3), padding="same", dilation=(1, 2)), lambda: normal(3, 4, 9, 8)),
    Case("conv2d-last", in_channels_last, lambda: normal(3, 4, 9, 8)),
    embedding("plain"),
    embedding("padding", padding_idx=2),
    embedding("negative-padding", padding_idx=-1),
    embedding("by-frequency", scale_grad_by_freq=True),
]  # fmt: skip


@contextmanager
def collecting(deferral: Deferral, *, when: bool = True) -> Iterator[Queue]:
    """Makes the backwards inside it the I of the queue that it gives. They are B unless `when`."""
    queue: Queue = {}
    deferral.queue = queue if when else None
    yield queue
    deferral.queue = None


class Operations(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def backward(module: nn.Module, input: Tensor, microbatch: int) -> None:
    output = module(input)
    output.backward(normal(*output.shape, seed=1 + microbatch, dtype=output.dtype))


def whole(module: nn.Module, input: Tensor, *, microbatches: int = 3) -> None:
    for microbatch in range(microbatches):
        backward(module, input, microbatch)


def halves(module: nn.Module, input: Tensor, *, microbatches: int = 3, defers: bool = True) -> None:
    """All the I, then all the W. Checks that each I `defers` something, or nothing."""
    deferral, queues = defer_weight_gradients(module), []
    for microbatch in range(microbatches):
        with collecting(deferral) as queue:
            backward(module, input, microbatch)
        queues.append(queue)
    for queue in queues:
        assert bool(queue) == defers
        run_products(queue)


def products_of(queue: Queue) -> list[Deferred]:
    """What the I of a queue has left for its W."""
    return [product for products in queue.values() for product in products]


def held_by(product: Deferred) -> tuple[Tensor, Tensor]:
    """The input and the gradient of the output that a layer's product holds."""
    assert isinstance(product[1], partial)
    _, _, input, gradient, _ = product[1].args
    return input, gradient


def gradients(module: nn.Module, input: Tensor) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()} | {"input": input.grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def gradients_of(step: Callable[..., None], module: nn.Module, input: Tensor) -> dict[str, Tensor]:
    module, input = copy.deepcopy(module), input.detach().requires_grad_(input.requires_grad)
    if step is not whole:
        defer_weight_gradients(module)
    (whole if step is at_once else step)(module, input)
    return gradients(module, input)


def at_once(module: nn.Module, input: Tensor) -> None:
    """B, on layers that may defer."""
    whole(module, input)


def require_near(here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    assert here.keys() == there.keys()
    for name, gradient in here.items():
        torch.testing.assert_close(gradient, there[name], rtol=1e-12, atol=1e-12)


def require_same_bits(here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    assert here.keys() == there.keys()
    for name, gradient in here.items():
        assert gradient.dtype is there[name].dtype
        assert _bits(gradient) == _bits(there[name]), name


def _bits(tensor: Tensor) -> bytes:
    return tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()


class Tied(nn.Module):
    """A language model whose head is its embedding's weight, with a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.twice = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.twice(functional.gelu(self.twice(self.words(words))))))
        return scores


TIED = Case("tied", Tied, embedding("").input)
