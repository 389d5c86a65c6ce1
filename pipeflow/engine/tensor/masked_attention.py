"""Attention of the last tokens of a sequence to those up to them, of which a sliding window or documents hide some.
Must not contain: which tokens of a sequence a rank or a slice holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeflow.engine.tensor.block_attention import LENGTH
from pipeflow.engine.tensor.context_attention import causal_attention
from pipeflow.engine.torch_private.modes import FakeTensor


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention by torch of the last tokens of a sequence, `query`, to the tokens up to them.

    Args:
        query: (batch, heads, queries, head size).
        key, value: (batch, heads of keys, tokens, head size), of all tokens up to the last query.
        window: how many tokens each query sees, itself included; by default all before it.
        documents: the number of each token's document, (batch, at least as many tokens). A query sees those of its
            document only. By default a sequence is one document.
        options: arguments of `scaled_dot_product_attention`.

    Returns the outputs (batch, heads, queries, head size).
    """
    queries, tokens = query.shape[LENGTH], key.shape[LENGTH]
    before = tokens - queries  # the first query
    start = 0 if window is None else max(0, before - window + 1)  # the first token that a query sees
    hides = window is not None and window < tokens
    if isinstance(query, FakeTensor) or (documents is None and not hides):
        return causal_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **options)
    key, value = (each.narrow(LENGTH, start, tokens - start) for each in (key, value))
    seen = query.new_ones(queries, tokens - start, dtype=torch.bool).tril(before - start)
    if window is not None:
        seen = seen.triu(before - start - window + 1)
    if documents is not None:
        own, others = documents[:, before:tokens, None], documents[:, None, start:tokens]
        seen = seen & (own == others)[:, None]
    # torch's fast kernels take no mask together with fewer heads of keys
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, seen, **options)
