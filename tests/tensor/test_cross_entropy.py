"""The loss of split logits is torch's of whole ones, with every option, and never lets padding take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.tensor.layer import cut
from pipeflow.tensor import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from tests.tensor.ranks import indices, normal, on_ranks, require_near


def part_of(whole: Tensor, padding: float = torch.nan) -> Tensor:
    """This rank's columns; those of padding hold what must not matter."""
    group, classes = current_context().tensor, whole.shape[-1]
    part = cut(whole, Split(whole.dim() - 1, classes), group)
    real = min(part.shape[-1], max(0, classes - group.rank * part.shape[-1]))
    part[..., real:] = padding
    return part


@settings(max_examples=60)
@given(
    size=st.sampled_from([1, 2, 3, 4]),
    classes=st.integers(1, 13),
    shape=st.sampled_from([(6,), (2, 3)]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignored=st.integers(0, 6),
    scale=st.sampled_from([1.0, 1e3]),
    seed=st.integers(0, 9),
)
def test_it_is_the_loss_of_whole_logits(
    size: int,
    classes: int,
    shape: tuple[int, ...],
    smoothing: float,
    reduction: Any,
    ignored: int,
    scale: float,
    seed: int,
) -> None:
    logits, labels = scale * normal(*shape, classes, seed=seed), indices(*shape, below=classes, seed=seed)
    labels.view(-1)[:ignored] = -100
    whole = logits.clone().requires_grad_()
    expected = functional.cross_entropy(
        whole.view(-1, classes), labels.view(-1), label_smoothing=smoothing, reduction=reduction
    )
    upstream = normal(*expected.shape, seed=seed)
    expected.backward(upstream)

    def rank() -> None:
        part = part_of(logits).requires_grad_()
        before, version = part.detach().clone(), part._version
        loss = vocab_parallel_cross_entropy(
            part, labels, vocab_size=classes, label_smoothing=smoothing, reduction=reduction
        )
        torch.testing.assert_close(
            loss.view(-1), expected.detach().view(-1), rtol=1e-12, atol=1e-12 * scale, equal_nan=True
        )
        loss.backward(upstream.view(loss.shape))
        assert whole.grad is not None
        assert part.grad is not None
        torch.testing.assert_close(part.grad, part_of(whole.grad, 0.0), rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(part.detach(), before, rtol=0, atol=0, equal_nan=True)
        assert part._version == version

    on_ranks(size, rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_computes_in_float32_at_least(dtype: torch.dtype) -> None:
    logits, labels = normal(64, 8, dtype=dtype), indices(64, below=8)
    precise = torch.float64 if dtype is torch.float64 else torch.float32
    expected = functional.cross_entropy(logits.to(precise), labels)

    def rank() -> None:
        part = part_of(logits).requires_grad_()
        loss = vocab_parallel_cross_entropy(part, labels)
        assert loss.dtype is precise
        require_near(loss, expected, 1e-6)
        loss.backward()
        assert part.grad is not None
        assert part.grad.dtype is dtype

    for size in (1, 2):
        on_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_a_native_loss_and_its_options(size: int) -> None:
    native = nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.2, reduction="sum")
    logits, labels = normal(9, 5), indices(9, below=5)

    def rank() -> None:
        loss = VocabParallelCrossEntropy.from_native_module(native, vocab_size=5)
        require_near(loss(part_of(logits), labels), native(logits, labels))

    on_ranks(size, rank)


def test_what_does_not_fit_is_refused() -> None:
    def rank() -> None:
        part = part_of(normal(3, 5))
        for label in (-1, 5):
            with pytest.raises(UsageError, match="labels must be from 0 to 4"):
                vocab_parallel_cross_entropy(part, torch.tensor([0, 1, label]), vocab_size=5)
        with pytest.raises(UsageError, match=r"takes logits of shape \(\.\.\., 4\)"):
            vocab_parallel_cross_entropy(part, torch.tensor([0, 1, 2]), vocab_size=8)
        with pytest.raises(UsageError, match="labels of shape"):
            vocab_parallel_cross_entropy(part, torch.tensor([0, 1]), vocab_size=5)
        with pytest.raises(UsageError, match="create_graph"):
            vocab_parallel_cross_entropy(part.requires_grad_(), torch.tensor([0, 1, 2]), vocab_size=5).backward(
                create_graph=True
            )

    on_ranks(2, rank)
    with pytest.raises(UsageError, match="label_smoothing must be"):
        VocabParallelCrossEntropy(label_smoothing=2.0)
    with pytest.raises(UsageError, match="reduction must be"):
        VocabParallelCrossEntropy(reduction="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="class weights"):
        VocabParallelCrossEntropy.from_native_module(nn.CrossEntropyLoss(torch.ones(3)))
