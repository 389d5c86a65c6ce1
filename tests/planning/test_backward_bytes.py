"""The bytes of gradients in a layer's backward, beside torch's own: live tensors of a block on the CPU."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

from pipeflow import GPT, Setup
from pipeflow.planning.kept import gradient_bytes

MODEL = GPT(1, 128, 4, 2048, 512, dropout=False)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations made, now and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor):
                self.add(value.untyped_storage())
        return found

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.free, key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)

    def free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


class Layer(nn.Module):
    """A transformer layer, with a gated MLP or without."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.heads = model.heads
        self.norms = nn.ModuleList(nn.LayerNorm(model.hidden) for _ in range(2))
        self.made, self.output = nn.Linear(model.hidden, 3 * model.hidden), nn.Linear(model.hidden, model.hidden)
        self.wide = nn.ModuleList(nn.Linear(model.hidden, model.wide) for _ in range(1 + model.gated))
        self.down = nn.Linear(model.wide, model.hidden)

    def forward(self, given: Tensor) -> Tensor:
        query, key, value = self.made(self.norms[0](given)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden: Tensor = given + self.output(attended.transpose(1, 2).flatten(2))
        made = [linear(self.norms[1](hidden)) for linear in self.wide]
        return torch.add(hidden, self.down(silu(made[0]) * made[1] if len(made) > 1 else gelu(made[0])))


@pytest.mark.parametrize("changed", [{}, {"ffn": 384}, {"gated": True, "ffn": 384}])
def test_a_backward_has_gradients_of_its_output_and_of_its_wide_linears(changed: dict[str, Any]) -> None:
    """Measured, they are up to 6 % more: also the parameters' gradients, and those of norms."""
    model = replace(MODEL, **changed)
    layer, live = Layer(model).to(torch.bfloat16), Live()
    given = torch.randn(2, model.tokens, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    with live:
        output = layer(given)
        saved = live.most = live.now
        output.backward(torch.ones_like(output))
    planned = gradient_bytes(model, Setup(microbatch_size=2))
    assert planned <= live.most - saved <= 1.06 * planned
