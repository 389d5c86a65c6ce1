"""Attention of tokens of a sequence, of which a sliding window, padding or documents hide some. Must not contain: which
tokens of a sequence a rank or a slice holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeflow.engine.tensor.block_attention import LENGTH
from pipeflow.engine.tensor.context_attention import causal_attention, full_attention
from pipeflow.engine.torch_private.modes import FakeTensor


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    before: int | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention by torch of some tokens of a sequence, `query`, to the tokens up to them, or to all.

    Args:
        query: (batch, heads, queries, head size).
        key, value: (batch, heads of keys, tokens, head size), of all tokens up to the last query, or of all.
        causal: whether a query sees tokens up to its own alone.
        before: how many tokens stand before the first query; by default the last query is the last token.
        window: how many tokens each query sees, itself included; in both directions if not causal. By default all.
        documents: the number of each token's document, (batch, at least as many tokens). A query sees those of its
            document only. By default a sequence is one document. A token with the number -1 - n is padding of document
            n, which no query sees.
        options: arguments of `scaled_dot_product_attention`.

    Returns the outputs (batch, heads, queries, head size).
    """
    queries, tokens = query.shape[LENGTH], key.shape[LENGTH]
    before = tokens - queries if before is None else before
    reach = tokens if window is None else window
    start, end = max(0, before - reach + 1), before + queries if causal else min(tokens, before + queries + reach - 1)
    if isinstance(query, FakeTensor) or (documents is None and reach >= tokens):
        attend = causal_attention if causal else full_attention
        return attend(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **options)
    key, value = (each.narrow(LENGTH, start, end - start) for each in (key, value))
    first = before - start  # the place of the first query among these keys
    seen = query.new_ones(queries, end - start, dtype=torch.bool).triu(first - reach + 1)
    seen = seen.tril(first if causal else first + reach - 1)
    if documents is not None:
        own, others = documents[:, before : before + queries, None], documents[:, None, start:end]
        seen = seen & (torch.where(own < 0, -1 - own, own) == others)[:, None]
    # torch's fast kernels take no mask together with fewer heads of keys
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, seen, **options)
