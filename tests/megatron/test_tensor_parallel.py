"""Layers, mappings, losses and seeds under Megatron-LM's names: those of pipeflow.tensor, in the other's form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeflow.core.errors import UsageError
from pipeflow.megatron.core import tensor_parallel
from pipeflow.megatron.core.parallel_state import get_tensor_model_parallel_rank
from pipeflow.tensor import Dropout
from pipeflow.testing import run_threads
from tests.megatron.small import configuration

CONFIG = configuration()


def normal(tensor: torch.Tensor) -> None:
    """As a configuration's init_method is."""
    tensor.normal_(0, 0.5, generator=torch.Generator().manual_seed(7))


def test_a_perceptron_over_two_ranks_is_that_of_one() -> None:
    def compute() -> Any:
        options: Any = {"config": CONFIG, "init_method": normal}
        wide = tensor_parallel.ColumnParallelLinear(6, 8, bias=True, gather_output=False, **options)
        narrow = tensor_parallel.RowParallelLinear(8, 6, bias=True, input_is_parallel=True, **options)
        assert wide.bias is not None
        assert not wide.bias.any()
        input = torch.arange(12.0, dtype=torch.float64).view(2, 6).requires_grad_()
        hidden, none = wide(input)
        output, none_either = narrow(hidden.relu())
        assert none is none_either is None
        output.square().sum().backward()
        return output.detach(), input.grad, wide.weight.grad

    [(output, gradient, of_weight)] = run_threads(compute, 1)
    assert output.abs().sum() > 0
    for rank, (part, given, half) in enumerate(run_threads(compute, 2, tensor=2)):
        torch.testing.assert_close((part, given), (output, gradient))
        torch.testing.assert_close(half, of_weight[4 * rank : 4 * rank + 4])


def test_an_embedding_and_the_loss_over_two_ranks_are_those_of_one() -> None:
    def compute() -> Any:
        words = tensor_parallel.VocabParallelEmbedding(10, 10, config=CONFIG, init_method=normal)
        ids = torch.tensor([[1, 9, 4]])
        found = words(ids)
        logits = tensor_parallel.scatter_to_tensor_model_parallel_region(found)
        smooth = tensor_parallel.vocab_parallel_cross_entropy(logits, ids, label_smoothing=0.1)
        return found.detach(), tensor_parallel.vocab_parallel_cross_entropy(logits, ids).detach(), smooth.detach(), ids

    [whole] = run_threads(compute, 1)
    found, losses, smooth, ids = whole
    expected = torch.nn.functional.cross_entropy(found[0], ids[0], reduction="none")
    torch.testing.assert_close(losses[0], expected)
    assert losses.shape == smooth.shape == (1, 3)
    for part in run_threads(compute, 2, tensor=2):
        torch.testing.assert_close(part, whole)


def test_mappings_exchange_what_their_names_say() -> None:
    def compute() -> None:
        rank = get_tensor_model_parallel_rank()
        last = torch.arange(4.0).view(1, 1, 4)
        mine = tensor_parallel.scatter_to_tensor_model_parallel_region(last)
        assert mine.flatten().tolist() == [2.0 * rank, 2.0 * rank + 1]
        assert tensor_parallel.gather_from_tensor_model_parallel_region(mine).equal(last)
        assert tensor_parallel.reduce_from_tensor_model_parallel_region(last).equal(2 * last)
        rows = last.view(1, 4, 1)
        piece = tensor_parallel.scatter_to_sequence_parallel_region(rows)
        assert piece.flatten().tolist() == mine.flatten().tolist()
        assert tensor_parallel.gather_from_sequence_parallel_region(piece).equal(rows)
        assert tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows).equal(2 * piece)
        for of_parts, factor in ((True, 3.0), (False, 1.0 + rank)):
            leaf = piece.clone().requires_grad_()
            whole = tensor_parallel.gather_from_sequence_parallel_region(leaf, tensor_parallel_output_grad=of_parts)
            (whole * (1.0 + rank)).sum().backward()
            assert leaf.grad is not None
            assert leaf.grad.flatten().tolist() == [factor, factor]
        leaf = last.clone().requires_grad_()
        (tensor_parallel.copy_to_tensor_model_parallel_region(leaf) * (1.0 + rank)).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.flatten().tolist() == [3.0] * 4

    run_threads(compute, 2, tensor=2)


def test_the_seed_is_that_of_dropout_over_the_ranks() -> None:
    def masks(seed: int) -> Any:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        shared, own = (Dropout(0.5, parallel_input=split) for split in (False, True))
        return shared(torch.ones(64)), own(torch.ones(64))

    (shared, own), (same, other) = run_threads(masks, 2, 3, tensor=2)
    assert shared.equal(same)
    assert not own.equal(other)
    [(changed, _), _] = run_threads(masks, 2, 4, tensor=2)
    assert not shared.equal(changed)


def test_what_is_not_there_is_refused() -> None:
    def refused() -> None:
        for layer in (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear):
            with pytest.raises(UsageError, match="adds its bias itself: remove skip_bias_add"):
                layer(4, 4, config=CONFIG, skip_bias_add=True)
        with pytest.raises(UsageError, match="cannot split out_features=5"):
            tensor_parallel.ColumnParallelLinear(4, 5, config=CONFIG)

    run_threads(refused, 2, tensor=2)
