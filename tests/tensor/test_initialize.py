"""The full weights are the same whatever the tensor size: those of the stock layer, or what a seed and a name give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from pipeflow.engine.tensor import random
from pipeflow.engine.tensor.layer import TensorLayer
from pipeflow.tensor import (
    Classifier,
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    LayerNorm,
    PatchEmbedding,
    RowParallelLinear,
    VocabParallelClassifier,
    VocabParallelEmbedding,
    initialize_,
)
from tests.tensor.ranks import Place, seeded

Make = Callable[..., TensorLayer]
LAYERS: dict[str, tuple[Make, Callable[..., nn.Module]]] = {
    "column": (lambda **o: ColumnParallelLinear(24, 36, **o), lambda **o: nn.Linear(24, 36, **o)),
    "row": (lambda **o: RowParallelLinear(24, 37, **o), lambda **o: nn.Linear(24, 37, **o)),
    "classifier": (lambda **o: Classifier(24, 5, **o), lambda **o: nn.Linear(24, 5, **o)),
    "vocabulary": (lambda **o: VocabParallelClassifier(24, 37, **o), lambda **o: nn.Linear(24, 37, **o)),
    "words": (lambda **o: VocabParallelEmbedding(37, 11, 3, **o), lambda **o: nn.Embedding(37, 11, 3, **o)),
    "hidden": (lambda **o: HiddenParallelEmbedding(37, 12, 3, **o), lambda **o: nn.Embedding(37, 12, 3, **o)),
    "norm": (lambda **o: LayerNorm(24, **o), lambda **o: nn.LayerNorm(24, **o)),
}
NAMED = pytest.mark.parametrize("name", LAYERS)


def assembled(layers: list[TensorLayer], name: str) -> Tensor:
    """The full parameter that the ranks' parts make."""
    split = layers[0].splits().get(name)
    parts = [layer.get_parameter(name).detach() for layer in layers]
    if split is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    whole = torch.cat(parts, split.dim)
    padding = whole.narrow(split.dim, split.size, whole.shape[split.dim] - split.size)
    assert int(padding.count_nonzero()) == 0
    return whole.narrow(split.dim, 0, split.size)


def ranks(size: int) -> list[Any]:
    return [Place(rank, size) for rank in range(size)]


@NAMED
@pytest.mark.parametrize("block", [1, 200, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_full_weights_are_the_stock_layers(
    name: str, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "_BLOCK", block)
    make, stock = LAYERS[name]
    native, left = seeded(lambda: (stock(dtype=dtype), torch.rand(1)))
    for size in (1, 2, 4):
        made = [seeded(lambda group: (make(dtype=dtype, group=group), torch.rand(1)), group) for group in ranks(size)]
        for parameter, whole in native.named_parameters():
            assert torch.equal(assembled([layer for layer, _ in made], parameter), whole), (size, parameter)
        assert all(torch.equal(after, left) for _, after in made), "the generator is left elsewhere"


@NAMED
def test_the_meta_device_draws_nothing(name: str) -> None:
    make, _ = LAYERS[name]
    before = torch.get_rng_state()
    layer = make(device="meta", group=ranks(2)[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in layer.parameters())
    splits = layer.splits()
    made = layer.to_empty(device="cpu")
    assert made.splits() == splits
    again = seeded(make, group=ranks(2)[1])
    seeded(lambda: made.reset_parameters())  # type: ignore[operator]
    for mine, theirs in zip(made.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def fill(name: str, block: Tensor, generator: Generator) -> None:
    block.normal_(std=0.02, generator=generator)


@NAMED
@pytest.mark.parametrize("block", [200, 2**24])
def test_a_seed_and_a_name_give_the_full_weights(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_BLOCK", block)
    make, _ = LAYERS[name]
    found: dict[int, dict[str, Tensor]] = {}
    for size in (1, 2, 4):
        layers = [make(device="meta", group=group).to_empty(device="cpu") for group in ranks(size)]
        for layer in layers:
            initialize_(layer, fill, seed=7, prefix="blocks.3")
        found[size] = {key: assembled(layers, key) for key, _ in layers[0].named_parameters()}
    for size in (2, 4):
        for key, whole in found[size].items():
            assert torch.equal(whole, found[1][key]), key


def test_names_and_seeds_differ_and_only_own_blocks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_BLOCK", 16 * 8)
    drawn: list[int] = []

    def noted(name: str, block: Tensor, generator: Generator) -> None:
        drawn.append(len(block))
        fill(name, block, generator)

    layer = ColumnParallelLinear(8, 128, bias=False, group=ranks(4)[1])
    values = []
    for seed, prefix in ((1, "a"), (2, "a"), (1, "b")):
        drawn.clear()
        initialize_(layer, noted, seed=seed, prefix=prefix)
        assert drawn == [16, 16]
        values.append(layer.weight.detach().clone())
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_stock_layers_and_patches_are_filled_too() -> None:
    module = nn.Sequential(PatchEmbedding(4, 2, 1, 4), nn.Linear(4, 4))
    initialize_(module, lambda name, block, _: block.fill_(len(name)), seed=0)
    for name, parameter in module.named_parameters():
        assert bool((parameter == len(name)).all())
