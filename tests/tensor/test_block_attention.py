"""Attention by blocks is that of all keys at once, in outputs and gradients, and keeps neither scores nor masks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad
from torch.nn import functional

from pipeflow import UsageError
from pipeflow.engine.tensor import block_attention
from pipeflow.engine.tensor.block_attention import attend, gradients_of, has_block_kernel
from pipeflow.engine.tensor.masked_attention import masked_attention
from tests.tensor.ranks import normal

QUERIES, KEYS, SIZE = 40, 100, 8


def inputs(heads: int = 4, shared: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values of two samples."""
    shapes = (2, heads, QUERIES, SIZE), (2, shared, KEYS, SIZE), (2, shared, KEYS, SIZE)
    return [normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def with_mask(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return functional.scaled_dot_product_attention(query, key, value, mask, **options)


def results(function: Any, three: list[Tensor], **options: Any) -> list[Tensor]:
    output = function(*three, **options)
    return [output, *torch.autograd.grad(output, three, normal(*output.shape, seed=9, dtype=output.dtype))]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 3e-6), (torch.bfloat16, 4e-2)], ids=str
)
def test_a_slice_has_the_attention_of_its_sequence(
    dtype: torch.dtype, tolerance: float, heads: int, shared: int, scale: float | None
) -> None:
    three = inputs(heads, shared, dtype)
    exact = [each.detach().double().requires_grad_() for each in three]
    assert has_block_kernel(*three)
    expected = results(with_mask, exact, scale=scale, enable_gqa=True)
    for mine, its in zip(results(masked_attention, three, scale=scale), expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [3, 1])
def test_operators_stand_for_a_kernel_that_is_missing(
    causal: bool, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, gradient = normal(2, 3, 7, 5), normal(2, 3, 7, 5, seed=1)
    key, value = normal(2, shared, 7, 5, seed=2), normal(2, shared, 7, 5, seed=3)

    def both() -> list[Tensor]:
        found = attend(query, key, value, causal=causal)
        return [*found, *gradients_of(gradient, query, key, value, found, causal=causal, scale=None)]

    expected = both()
    monkeypatch.setattr(block_attention, "CPU_FLASH", None)
    monkeypatch.setattr(block_attention, "CPU_FLASH_BACKWARD", None)
    for mine, its in zip(both(), expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-14, atol=1e-14)
    three = inputs()
    for mine, its in zip(results(masked_attention, three), results(with_mask, three), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-14, atol=1e-14)


def kept(function: Any, *arguments: Any, **options: Any) -> dict[int, int]:
    """The bytes of each memory that a forward keeps."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*arguments, **options)
    return found


@pytest.mark.parametrize("shared", [4, 2])
def test_what_is_kept_grows_with_tokens_alone(shared: int) -> None:
    """Queries, outputs and a number per query, beside keys and values, which other slices keep, too: no copies."""
    query, key, value = inputs(4, shared)
    found = kept(masked_attention, query, key, value)
    keys = {each.untyped_storage().data_ptr() for each in (key, value)}
    assert keys <= set(found)
    assert sum(size for place, size in found.items() if place not in keys) == 2 * query.nbytes + query.nbytes // SIZE


def test_a_query_is_not_kept_with_the_keys_beside_it() -> None:
    mixed = normal(2, QUERIES, 4, 3, SIZE).requires_grad_()
    query, _, _ = mixed.permute(3, 0, 2, 1, 4)
    found = kept(masked_attention, query, *inputs()[1:])
    assert mixed.untyped_storage().data_ptr() not in found


def turned(three: list[Tensor]) -> list[Tensor]:
    """The same values, whose entries do not lie side by side."""
    return [each.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for each in three]


OTHERS: dict[str, tuple[list[Tensor], Any]] = {
    "entries apart": (turned(inputs()), nullcontext()),
    "values of another size": ([*inputs()[:2], normal(2, 4, KEYS, 3).requires_grad_()], nullcontext()),
    "autocast": (inputs(dtype=torch.float32), torch.autocast("cpu")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_kernel_does_not_take_is_left_to_torch(name: str) -> None:
    three, region = OTHERS[name]
    with region:
        assert not has_block_kernel(*three)
        found = zip(results(masked_attention, three), results(with_mask, three), strict=True)
    for mine, expected in found:
        torch.testing.assert_close(mine, expected)


def test_dropout_is_left_to_torch() -> None:
    three = inputs()
    found = []
    for function in (masked_attention, with_mask):
        torch.manual_seed(0)
        found.append(function(*three, dropout_p=0.5))
    torch.testing.assert_close(*found)


def test_a_second_derivative_is_an_error() -> None:
    three = inputs()
    with pytest.raises(UsageError, match="leave create_graph=True out"):
        torch.autograd.grad(masked_attention(*three).sum(), three[:1], create_graph=True)


def of_whole(mixed: Tensor) -> Tensor:
    query, key, value = mixed.permute(3, 0, 2, 1, 4)
    return masked_attention(query, key, value)


@pytest.mark.slow
def test_attention_of_whole_sequences_compiles_as_one_graph() -> None:
    mixed = normal(1, KEYS, 4, 3, SIZE)
    compiled: Any = torch.compile(of_whole, backend="eager", fullgraph=True)
    assert torch.equal(compiled(mixed), of_whole(mixed))


def test_transforms_of_torch_func_are_left_to_torch() -> None:
    three = inputs()

    def total(query: Tensor) -> Tensor:
        return masked_attention(query, *three[1:]).sum()

    torch.testing.assert_close(grad(total)(three[0]), torch.autograd.grad(total(three[0]), three[0])[0])
