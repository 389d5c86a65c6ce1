"""Attention within windows and documents is that of scores written out, also for the last queries alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow.engine.tensor.masked_attention import masked_attention

TOKENS = 12
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 9], [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 9]])
"""They may go on behind the tokens up to the last query."""
PADDED = torch.tensor([[-1, 0, 0, 1, -2, -3, 2, 2, 2, 2, 3, -4, 9], [-1, -1, 0, 0, 0, 0, 0, -2, -2, 1, 1, 1, 9]])
"""Padding of `DOCUMENTS`."""


def drawn(heads: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(2, heads, tokens, 4, generator=generator, dtype=torch.float64)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    documents: Tensor | None,
    before: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Token by token, with each head of keys twice."""
    outputs = torch.zeros_like(query)
    first = key.shape[2] - query.shape[2] if before is None else before
    for sample in range(query.shape[0]):
        for row in range(query.shape[2]):
            at = first + row
            seen = [
                other
                for other in range(at + 1 if causal else key.shape[2])
                if (window is None or abs(at - other) < window)
                and (documents is None or documents[sample, other] == DOCUMENTS[sample, at])
            ]
            for head in range(query.shape[1]):
                scores = key[sample, head // 2, seen] @ query[sample, head, row] / query.shape[-1] ** 0.5
                outputs[sample, head, row] = scores.softmax(0) @ value[sample, head // 2, seen]
    return outputs


@pytest.mark.parametrize("queries", [1, 5, TOKENS])
@pytest.mark.parametrize("documents", [None, DOCUMENTS, PADDED], ids=["one", "documents", "padding"])
@pytest.mark.parametrize("window", [None, 1, 4, TOKENS, TOKENS + 1])
def test_each_token_sees_those_of_its_window_and_document(
    window: int | None, documents: Tensor | None, queries: int
) -> None:
    query, key, value = drawn(4)[:, :, -queries:], drawn(2), drawn(2).flip(2)
    options: dict[str, Any] = {"window": window, "documents": documents}
    found = masked_attention(query, key, value, **options)
    expected = written_out(query, key, value, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("queries", "before"), [(TOKENS, 0), (5, 0), (5, 3), (5, TOKENS - 5)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS, PADDED], ids=["one", "documents", "padding"])
@pytest.mark.parametrize("window", [None, 1, 4, TOKENS])
def test_tokens_see_later_ones_of_their_window_and_document(
    window: int | None, documents: Tensor | None, queries: int, before: int
) -> None:
    query, key, value = drawn(4)[:, :, -queries:], drawn(2), drawn(2).flip(2)
    options: dict[str, Any] = {"window": window, "documents": documents, "before": before, "causal": False}
    found = masked_attention(query, key, value, **options)
    torch.testing.assert_close(found, written_out(query, key, value, **options), rtol=0, atol=1e-12)


def test_options_are_those_of_torch() -> None:
    query, key, value = drawn(4), drawn(2), drawn(2)
    scaled = masked_attention(query * 3, key, value, window=4)
    torch.testing.assert_close(masked_attention(query, key, value, window=4, scale=1.5), scaled, rtol=0, atol=1e-12)
