"""Attention of some tokens of a sequence, from which a sliding window, padding or documents may hide others. Must not
contain: which tokens of a sequence a rank or a slice holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right

from pipeflow.engine.deferral.past import TOKENS
from pipeflow.engine.parallel.transport.protocol import Alone
from pipeflow.engine.tensor.block_attention import HEADS, attention_by_blocks, has_block_kernel, seen_keys
from pipeflow.engine.torch_private.autograd import is_under_functorch
from pipeflow.engine.torch_private.modes import FakeTensor, disable_current_modes
from pipeflow.engine.torch_private.tensors import storage_key

HIDING = ("window", "documents")
"""Arguments that hide some of the tokens from a query."""


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
    queries, tokens = query.shape[TOKENS], key.shape[TOKENS]
    before = tokens - queries if before is None else before
    reach = tokens if window is None else window
    seen: Any = None
    if not isinstance(query, FakeTensor) and (documents is not None or reach < tokens):
        end = before + queries if causal else min(tokens, before + queries + reach - 1)
        start = max(0, before - reach + 1)
        first = before - start  # the place of the first query among the keys that are read
        key, value = (each.narrow(TOKENS, start, end - start) for each in (key, value))
        seen = seen_keys(query, end - start, before=first, reach=reach, later=0 if causal else reach - 1)
        if documents is not None:
            own, others = documents[:, before : before + queries, None], documents[:, None, start:end]
            seen = seen & (torch.where(own < 0, -1 - own, own) == others)[:, None]
    elif causal:
        if _is_part_of_other(query, key):
            query = query.clone()  # else the memory of which it is a part would be kept with it
        if queries < tokens:
            if not options.get("dropout_p") and has_block_kernel(query, key, value):
                return attention_by_blocks(Alone(), query, key, value, scale=options.get("scale"))
            seen = _mask_to_earlier(query, tokens)
    return plain_attention(query, key, value, seen, is_causal=causal and seen is None, **options)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, seen: Any = None, **options: Any) -> Tensor:
    """Torch's `scaled_dot_product_attention`, of as many heads of keys as of queries or fewer.

    Args:
        query, key, value: as of `masked_attention`.
        seen: the mask; None if there is none.
        options: further arguments of torch's function.
    """
    is_grouped = key.shape[HEADS] != query.shape[HEADS]
    if is_grouped and seen is not None and not isinstance(seen, CausalBias):  # torch's fast kernels do not take both
        key, value = (each.repeat_interleave(query.shape[HEADS] // each.shape[HEADS], HEADS) for each in (key, value))
        is_grouped = False
    return functional.scaled_dot_product_attention(query, key, value, seen, enable_gqa=is_grouped, **options)


def _mask_to_earlier(query: Tensor, tokens: int) -> Tensor:
    """The mask of the last queries of a sequence, which a GPU needs not in memory."""
    if isinstance(query, FakeTensor):
        return seen_keys(query, tokens)
    with disable_current_modes():  # the mask has no values, and cannot be made where a mode sees operators
        return causal_lower_right(query.shape[TOKENS], tokens)


def _is_part_of_other(query: Tensor, key: Tensor) -> bool:
    """Whether queries lie in larger memory than their own, which the keys do not need."""
    if torch.compiler.is_compiling() or is_under_functorch():  # neither has memory that could be asked for
        return False
    return storage_key(query) != storage_key(key) and query.untyped_storage().nbytes() > query.nbytes
