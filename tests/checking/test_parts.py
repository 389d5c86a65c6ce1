"""Parts: how sketches of parts make up the whole, and which parts engines have."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow.checking import keep_weights, take_weights
from pipeflow.checking.parts import parts_of
from pipeflow.checking.sketches import Block, flat_blocks, norm_squared, row_sketches, sketch
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.original import unwrapped_name


@pytest.mark.parametrize("shape", [(12,), (6, 4), (4, 3, 5)])
def test_flat_ranges_add_up_to_the_whole(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, dtype=torch.float64)
    flat, starts = whole.flatten(), [0, 1, 5, 7, whole.numel()]
    found = sum(
        sketch(block) for start, end in pairwise(starts) for block in flat_blocks(flat[start:end], start, shape)
    )
    torch.testing.assert_close(found, sketch(Block(whole, (0,) * len(shape))))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_even_parts_add_up_to_the_whole(dim: int) -> None:
    whole = torch.randn(4, 6, 8)
    found = torch.zeros(8, dtype=torch.float64)
    for index, part in enumerate(whole.chunk(2, dim)):
        offset = [0, 0, 0]
        offset[dim] = index * part.shape[dim]
        found += sketch(Block(part, tuple(offset)))
    torch.testing.assert_close(found, sketch(Block(whole, (0, 0, 0))), rtol=1e-5, atol=1e-4)


def test_a_sketch_estimates_the_norm() -> None:
    estimates = [sketch(Block(torch.randn(40, 30), (0, 0))).square().mean() / 1200 for _ in range(200)]
    assert abs(float(torch.stack(estimates).mean()) - 1.0) < 0.1
    assert float(norm_squared(torch.full((3,), 2.0))) == pytest.approx(12.0)


def test_the_gradient_of_a_layer_is_that_of_its_samples() -> None:
    """The sketch of a product is the product of sketches: dimension 0 is that of an output's last one."""
    values = torch.randn(3, 5, dtype=torch.float64)
    columns = torch.eye(5, dtype=torch.float64)
    rows = row_sketches(columns, (0,))[:, :8]
    assert torch.allclose(values @ rows, row_sketches(values, (0,))[:, :8])


def test_names_without_wrappers() -> None:
    assert unwrapped_name("module.module.blocks.0.module.weight") == "blocks.0.module.weight"


def test_attributes_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 4, get_tensor_model_parallel_rank=lambda: 2)
    layer: Any = nn.Linear(3, 2)
    layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
    [own, _] = parts_of([layer], None, None)  # an engine's own attributes say no rank
    assert own.shape == (2, 3)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    weight, bias = parts_of([layer], None, None)
    assert (weight.shape, weight.offsets) == ((8, 3), [((4, 0), (2, 3))])
    assert bias.shape == (2,)
    layer.weight.main_grad = torch.ones(2, 3)
    assert weight.gradient() is layer.weight.main_grad


def test_what_a_function_says() -> None:
    layer = nn.Linear(4, 6, bias=False)
    [even] = parts_of([layer], lambda *_: (1, 1, 2), None)
    assert (even.shape, even.offsets) == ((6, 8), [((0, 4), (6, 4))])
    cuts = [((slice(0, 3),), (0, 0)), ((slice(3, 6),), (6, 0))]
    [packed] = parts_of([layer], lambda *_: ((12, 4), cuts), None)
    assert (packed.shape, [offset for offset, _ in packed.offsets]) == ((12, 4), [(0, 0), (6, 0)])
    with pytest.raises(UsageError, match="return None"):
        parts_of([layer], lambda *_: 3, None)


def test_weights_are_handed_over(tmp_path: Path) -> None:
    plain_model, part = nn.Linear(4, 6), nn.Linear(4, 3)
    keep_weights(tmp_path, nn.ModuleDict({"layer": plain_model}))
    take_weights(tmp_path, part, parts=lambda *_: (0, 1, 2), names=lambda name: f"layer.{name}")
    torch.testing.assert_close(part.weight, plain_model.weight[3:])
    torch.testing.assert_close(part.bias, plain_model.bias[3:])
    with pytest.raises(UsageError, match="has no weight of shape"):
        take_weights(tmp_path, part)
    with pytest.raises(UsageError, match="has no weights"):
        take_weights(tmp_path / "never", part)
