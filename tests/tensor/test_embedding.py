"""Embeddings give what nn.Embedding gives, whatever the vocabulary; patches and norms what stock layers give."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import partial_in, splits_of
from pipeflow.tensor import HiddenParallelEmbedding, LayerNorm, PatchEmbedding, VocabParallelEmbedding
from tests.tensor.ranks import (
    SIZES,
    Place,
    backward,
    indices,
    mine,
    normal,
    on_ranks,
    require_near,
    require_parts,
    seeded,
)

SIZED = pytest.mark.parametrize("size", SIZES)


@pytest.mark.some(30)
@SIZED
@pytest.mark.parametrize("vocabulary", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("kind", [VocabParallelEmbedding, HiddenParallelEmbedding])
def test_embeddings(size: int, vocabulary: int, padding: int | None, kind: Any) -> None:
    native = seeded(nn.Embedding, vocabulary, 8, padding, dtype=torch.float64)
    words = indices(3, 6, below=vocabulary)
    output, _ = backward(native, words)

    def rank() -> None:
        layer = kind.from_native_module(native)
        require_near(backward(layer, words)[0], output, 0.0)
        require_parts(layer, native)

    on_ranks(size, rank)


@SIZED
def test_an_embedding_into_a_split_sequence(size: int) -> None:
    native, words = seeded(nn.Embedding, 13, 8, dtype=torch.float64), indices(3, 8, below=13)
    output, _ = backward(native, words)

    def rank() -> None:
        layer = VocabParallelEmbedding.from_native_module(native, sequence_parallel=True)
        part, _ = backward(layer, words, mine(normal(*output.shape, seed=9), 1))
        require_near(part, mine(output, 1), 0.0)
        require_parts(layer, native)

    on_ranks(size, rank)


def test_padding_is_logged_once_and_stays_zero(caplog: pytest.LogCaptureFixture) -> None:
    def rank() -> list[int]:
        layer = VocabParallelEmbedding(5, 4)
        layer(torch.arange(5)).sum().backward()
        assert layer.weight.grad is not None
        return [int(weight.count_nonzero()) for weight in (layer.weight, layer.weight.grad)]

    with caplog.at_level(logging.INFO, "pipeflow"):
        assert on_ranks(4, rank) == [[8, 8], [8, 8], [4, 4], [0, 0]]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["VocabParallelEmbedding pads num_embeddings=5 to 8: 2 rows on each of 4"]


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, HiddenParallelEmbedding])
@pytest.mark.parametrize("word", [-1, 5])
def test_an_index_that_is_none_of_the_vocabulary_is_an_error(kind: Any, word: int) -> None:
    def rank() -> None:
        with pytest.raises(UsageError, match="indices of an embedding must be from 0 to 4"):
            kind(5, 4)(torch.tensor([word]))

    on_ranks(2, rank)


def test_what_does_not_fit_is_refused() -> None:
    place: Any = Place(0, 4)
    with pytest.raises(UsageError, match="HiddenParallelEmbedding cannot split embedding_dim=6 over 4"):
        HiddenParallelEmbedding(8, 6, group=place)
    with pytest.raises(UsageError, match="padding_idx=8 is out of range for 8"):
        VocabParallelEmbedding(8, 6, padding_idx=8)
    with pytest.raises(UsageError, match="max_norm"):
        VocabParallelEmbedding.from_native_module(nn.Embedding(8, 6, max_norm=1.0))
    with pytest.raises(UsageError, match="patch_size=3 does not divide image_size=8"):
        PatchEmbedding(8, 3, 1, 4)
    with pytest.raises(UsageError, match="images of 8 x 8"):
        PatchEmbedding(8, 4, 1, 4)(torch.ones(1, 1, 4, 16))
    for convolution in (nn.Conv2d(3, 4, 4), nn.Conv2d(3, 4, 4, 4, padding=1), nn.Conv2d(3, 4, 4, 4, bias=False)):
        with pytest.raises(UsageError, match="is made from"):
            PatchEmbedding.from_native_module(convolution, image_size=8)


def test_patches() -> None:
    convolution: nn.Conv2d = seeded(nn.Conv2d, 3, 8, 4, 4, dtype=torch.float64)
    layer = PatchEmbedding.from_native_module(convolution.eval(), image_size=12)
    assert not layer.training
    images = normal(2, 3, 12, 12)
    assert convolution.bias is not None
    tokens = layer(images) - layer.positions
    assert tokens.shape == (2, 10, 8)
    assert int(tokens[:, 0].count_nonzero()) == 0
    for row in range(3):
        for column in range(3):
            patch = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            expected = torch.einsum("bcij,ocij->bo", patch, convolution.weight) + convolution.bias
            require_near(tokens[:, 1 + 3 * row + column], expected)
    assert splits_of(layer) == {}


@SIZED
def test_a_norm_over_a_split_sequence_has_parts_of_its_gradient(size: int) -> None:
    native = seeded(nn.LayerNorm, 8, eps=1e-3, dtype=torch.float64)
    input = normal(2, 8, 8)
    output, of_input = backward(native, input)
    assert of_input is not None

    def rank() -> list[Tensor | None]:
        group = current_context().tensor
        layer = LayerNorm.from_native_module(native, sequence_parallel=True)
        part, gradient = backward(layer, mine(input, 1), mine(normal(*output.shape, seed=9), 1))
        require_near(part, mine(output, 1))
        require_near(gradient, mine(of_input, 1))
        partial = partial_in(layer)
        assert [id(p) for p in partial] == ([] if group.size == 1 else [id(layer.weight), id(layer.bias)])
        assert partial_in(LayerNorm(8)) == []
        for parameter in partial:
            assert parameter.grad is not None
            group.all_reduce(parameter.grad).wait()
        require_parts(layer, native)
        return [parameter.grad for parameter in layer.parameters()]

    on_ranks(size, rank)
