"""Causal attention of tokens that context ranks share. Each sequence is cut into 2 c equal parts for c context ranks.
Rank i holds parts i and 2 c - 1 - i, so that all ranks compute equally many scores. This is the head-tail order of
arXiv 2407.21783, section 3.3.2. Must not contain: which tokens of a batch a rank reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.sharding import own_tokens
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.tensor.block_attention import LENGTH, attention_to_earlier, can_attend
from pipeflow.engine.tensor.layer import TensorLayer
from pipeflow.engine.tensor.regions import exchanged, gathered, sum_scattered
from pipeflow.engine.torch_private.modes import FakeTensor, disable_current_modes
from pipeflow.engine.torch_private.tensors import storage_key

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries to keys and values, of which the last query sees all and each earlier one sees one less."""


def context_group() -> Group:
    """The context group of the context, or a group of one rank without a launch."""
    context = context_if_launched()
    return Alone() if context is None else context.context


class ContextAttention(TensorLayer):
    """Causal attention, over all tokens of each sequence, of the tokens that this context rank holds.

    The keys and values of all context ranks are gathered: a forward receives (c - 1) / c x 2 S h d elements per
    sequence, for S tokens and h heads of size d on this tensor rank. A backward sends as many.

    Args:
        group: the context ranks; by default the context group of the context, or a group of one without a launch.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.join(context_group() if group is None else group)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """The outputs of this rank's tokens, in their order.

        Args:
            query, key, value: (batch, heads, length, head size) of this rank's tokens, parts i and 2 c - 1 - i.
            attend: computes the attention of one part's queries to the keys and values of all tokens up to its end.
        """
        ranks, rank = self.group.size, self.group.rank
        if ranks == 1:
            return attend(query, key, value)
        pair = torch.stack([key, value])
        keys, values = exchanged(pair, self.group, _gathered_in_order, _sum_scattered_in_order)
        length = query.shape[LENGTH] // 2
        ends = [(part + 1) * length for part in (rank, 2 * ranks - 1 - rank)]
        seen = [
            attend(own, keys.narrow(LENGTH, 0, end), values.narrow(LENGTH, 0, end))
            for own, end in zip(query.chunk(2, LENGTH), ends, strict=True)
        ]
        return torch.cat(seen, LENGTH)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention by torch of the last tokens of a sequence, `query`, to all tokens up to them. `options` are arguments
    of `scaled_dot_product_attention`.
    """
    queries, keys = query.shape[LENGTH], key.shape[LENGTH]
    if storage_key(query) != storage_key(key) and query.untyped_storage().nbytes() > query.nbytes:
        query = query.clone()  # else the memory of which it is a part would be kept with it
    if queries == keys:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if not options.get("dropout_p") and can_attend(query, key, value):
        return attention_to_earlier(query, key, value, scale=options.get("scale"))
    if isinstance(query, FakeTensor):
        mask = query.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    else:
        with disable_current_modes():  # the mask has no values, and cannot be made where a mode sees operators
            mask = causal_lower_right(queries, keys)
    return functional.scaled_dot_product_attention(query, key, value, mask, **options)


def _gathered_in_order(group: Group, pair: Tensor) -> Tensor:
    """The keys and values of all ranks, in the order of the sequence."""
    heads, tails = gathered(group, pair[None], 0).chunk(2, LENGTH + 2)
    return torch.cat([*heads, *tails.flip(0)], LENGTH + 1)


def _sum_scattered_in_order(group: Group, whole: Tensor) -> Tensor:
    """This rank's tokens of the sum over the ranks."""
    mine = partial(own_tokens, whole, ranks=group.size, dim=LENGTH + 1)
    return sum_scattered(group, torch.stack([mine(rank=rank) for rank in range(group.size)]), 0)[0]
