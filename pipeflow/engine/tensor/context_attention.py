"""Attention of tokens that context ranks share. Each sequence is cut into 2 c equal parts for c context ranks. Rank i
holds parts i and 2 c - 1 - i, so that all ranks compute equally many scores of causal attention. This is the head-tail
order of arXiv 2407.21783, section 3.3.2. Must not contain: which tokens of a batch a rank reads, and the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.past import TOKENS, is_sliced, joined, tokens_before
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.sharding import all_tokens, own_tokens, token_parts
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.tensor.block_attention import HEADS, attention_by_blocks
from pipeflow.engine.tensor.layer import TensorLayer
from pipeflow.engine.tensor.masked_attention import HIDING, masked_attention
from pipeflow.engine.tensor.regions import exchanged, gathered, start_all_to_all, sum_scattered
from pipeflow.engine.torch_private.modes import FakeTensor

Attend = Callable[..., Tensor]
"""Attention of queries to keys and values, such as `masked_attention`. If it is causal, the last query sees all and
each earlier one sees one less. Otherwise it takes `before`, the number of tokens before the first query.
"""


def context_group() -> Group:
    """The context group of the context, or a group of one rank without a launch."""
    context = context_if_launched()
    return Alone() if context is None else context.context


def has_parts(layer: nn.Module, group: Group) -> bool:
    """Whether the stage of `layer` has a part of each sequence: one of the context ranks of `group`, or a slice."""
    return group.size > 1 or is_sliced(layer)


def positions_of(layer: nn.Module, group: Group, length: int, device: torch.device) -> Tensor:
    """The positions in the whole sequence of the `length` tokens that the stage of `layer` has of it, (1, length). They
    are those of a slice, and of a rank of `group`, the context ranks.
    """
    before = tokens_before(layer)
    positions = torch.arange(before, before + length * group.size, device=device)[None]
    return positions if group.size == 1 else own_tokens(positions, group.rank, group.size, dim=1)


class ContextAttention(TensorLayer):
    """Attention, over all tokens of each sequence, of the tokens that this context rank holds.

    With "gather", the keys and values of all context ranks are gathered: a forward receives (c - 1) / c x 2 S h d
    elements per sequence, for S tokens and h heads of size d on this tensor rank. A backward sends as many.

    With "ring", they come from one rank at a time, as in ring attention (Liu et al., arXiv 2310.01889). A rank keeps
    its own for the backward, a c-th of those of the sequence. A forward receives as much as with "gather". A backward
    receives that again, and sends as much of gradients.

    With "all_to_all", each rank gets the queries, keys and values of all tokens for some of the heads, as in Ulysses
    (Jacobs et al., arXiv 2309.14509), and sends the outputs back. A forward receives (c - 1) / c^2 x S (2 h_q + 2 h_kv)
    d elements per sequence, for h_q heads of queries and h_kv of keys, and a backward as many. Heads of keys that c
    does not divide are repeated first, to the least common multiple of both.

    A slice of a sequence is divided over the ranks as a sequence is. With "gather", a rank keeps the keys of all tokens
    of earlier slices, as of a whole sequence, and gathers those of the slice alone. With "all_to_all", it keeps those
    of its heads. With "ring", it keeps its own of each slice, and receives those of earlier slices again.

    Args:
        group: the context ranks; by default the context group of the context, or a group of one without a launch.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.join(context_group() if group is None else group)
        context = context_if_launched()
        self.exchange = "gather" if context is None else context.context_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend: Attend = masked_attention,
        layer: nn.Module | None = None,
        **options: Any,
    ) -> Tensor:
        """The outputs of this rank's tokens, in their order.

        Args:
            query, key, value: (batch, heads, length, head size) of this rank's tokens, parts i and 2 c - 1 - i.
            attend: computes the attention of one part's queries to the keys and values of all tokens up to its end, or
                of all tokens if it is not causal.
            layer: what keeps keys and values of a slice for later ones, by `joined`; by default this module.
            options: arguments of `attend`, such as `scale`, and `causal` unless it is.

        Raises UsageError with "ring" for attention with dropout, a window or documents, and for another `attend` than
        `masked_attention`; with "all_to_all" for heads of queries that cannot be divided equally.
        """
        ranks, rank, causal = self.group.size, self.group.rank, options.get("causal", True)
        layer = self if layer is None else layer
        self._require_fits(query, attend, options)
        if ranks == 1 or isinstance(query, FakeTensor):  # of a module that is planned: no rank sends anything
            return attend(query, *joined(layer, key, value), **options)
        if self.exchange == "all_to_all":
            return _attention_by_heads(
                self.group, query, key, value, lambda own, *pair: attend(own, *joined(layer, *pair), **options)
            )
        if self.exchange == "ring":
            scale = options.get("scale")
            return attention_by_blocks(self.group, query, *joined(layer, key, value), causal=causal, scale=scale)
        pair = torch.stack([key, value])
        keys, values = joined(layer, *exchanged(pair, self.group, _gathered_in_order, _sum_scattered_in_order))
        length, seen = query.shape[TOKENS] // 2, list[Tensor]()
        earlier = keys.shape[TOKENS] - 2 * ranks * length
        for part, own in zip(token_parts(rank, ranks), query.chunk(2, TOKENS), strict=True):
            if causal:
                end = earlier + (part + 1) * length
                seen.append(attend(own, keys.narrow(TOKENS, 0, end), values.narrow(TOKENS, 0, end), **options))
            else:
                seen.append(attend(own, keys, values, before=part * length, **options))
        return torch.cat(seen, TOKENS)

    def _require_fits(self, query: Tensor, attend: Attend, options: dict[str, Any]) -> None:
        ranks, heads = self.group.size, query.shape[HEADS]
        is_known = attend is masked_attention and not any(options.get(name) is not None for name in HIDING)
        if self.exchange == "ring" and ranks > 1 and not (is_known and not options.get("dropout_p")):
            raise UsageError(
                'context_attention="ring" computes attention without dropout, windows, padding and packed documents '
                'alone: launch with context_attention="gather" or "all_to_all"'
            )
        if self.exchange == "all_to_all" and heads % ranks:
            raise UsageError(
                f'context_attention="all_to_all" divides heads over {ranks} context ranks, but there are {heads} on '
                'each tensor rank: launch with context_attention="gather" or "ring"'
            )


def _gathered_in_order(group: Group, pair: Tensor) -> Tensor:
    """The keys and values of all ranks, in the order of the sequence."""
    return all_tokens(gathered(group, pair[None], 0).unbind(), TOKENS)


def _sum_scattered_in_order(group: Group, whole: Tensor) -> Tensor:
    """This rank's tokens of the sum over the ranks."""
    return sum_scattered(group, _by_rank(group, whole), 0)[0]


def _by_rank(group: Group, whole: Tensor) -> Tensor:
    """The tokens of each rank out of those of the sequence, in a new first dimension."""
    return torch.stack([own_tokens(whole, rank, group.size, TOKENS) for rank in range(group.size)])


def _attention_by_heads(group: Group, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
    """The outputs of this rank's tokens, of attention that each rank computes for its heads and all tokens."""
    ranks, shared = group.size, key.shape[HEADS]
    key, value = (each.repeat_interleave(lcm(shared, ranks) // shared, HEADS) for each in (key, value))
    three = [each.unflatten(HEADS, (ranks, -1)) for each in (query, key, value)]
    own = exchanged(torch.cat(three, HEADS + 1).flatten(HEADS, HEADS + 1), group, _heads_of_all, _tokens_of_all)
    seen = attend(*own.split([each.shape[HEADS + 1] for each in three], HEADS))
    return exchanged(seen, group, _tokens_of_all, _heads_of_all)


def _heads_of_all(group: Group, tokens: Tensor) -> Tensor:
    """All tokens of this rank's heads, in the order of the sequence, from all heads of this rank's tokens."""
    parts = tokens.unflatten(HEADS, (group.size, -1)).movedim(HEADS, 0)
    return all_tokens(_swapped(group, parts).unbind(), TOKENS)


def _tokens_of_all(group: Group, heads: Tensor) -> Tensor:
    """All heads of this rank's tokens, from all tokens of this rank's heads."""
    return _swapped(group, _by_rank(group, heads)).movedim(0, HEADS).flatten(HEADS, HEADS + 1)


def _swapped(group: Group, parts: Tensor) -> Tensor:
    """What each rank has for this one, of parts for each."""
    return start_all_to_all(group, parts, [1] * group.size, [1] * group.size)()
