"""Attention of tokens that context ranks share. Each sequence is cut into 2 c equal parts for c context ranks. Rank i
holds parts i and 2 c - 1 - i, so that all ranks compute equally many scores of causal attention. This is the head-tail
order of arXiv 2407.21783, section 3.3.2. Must not contain: which tokens of a batch a rank reads, and the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.sharding import own_tokens
from pipeflow.engine.parallel.transport.protocol import Alone, Group, Work
from pipeflow.engine.tensor.block_attention import (
    LENGTH,
    Attended,
    attend,
    attention_to_earlier,
    by_shared_heads,
    can_split,
    gradients_of,
    require_first_derivative,
)
from pipeflow.engine.tensor.layer import TensorLayer
from pipeflow.engine.tensor.regions import exchanged, gathered, start_all_to_all, sum_scattered
from pipeflow.engine.torch_private.autograd import is_under_functorch
from pipeflow.engine.torch_private.modes import FakeTensor, disable_current_modes
from pipeflow.engine.torch_private.tensors import storage_key

HEADS = 1  # the dimension
Attend = Callable[..., Tensor]
"""Attention of queries to keys and values. If it is causal, the last query sees all and each earlier one sees one less.
Otherwise the first query is token `before` of those with keys.
"""
Join = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Puts keys and values of a slice of a sequence behind those of earlier slices."""


def context_group() -> Group:
    """The context group of the context, or a group of one rank without a launch."""
    context = context_if_launched()
    return Alone() if context is None else context.context


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
        attend: Attend,
        join: Join | None = None,
        *,
        causal: bool = True,
        **options: Any,
    ) -> Tensor:
        """The outputs of this rank's tokens, in their order.

        Args:
            query, key, value: (batch, heads, length, head size) of this rank's tokens, parts i and 2 c - 1 - i.
            attend: computes the attention of one part's queries to the keys and values of all tokens up to its end, or
                of all tokens if it is not causal.
            join: in a slice, puts keys and values behind those of earlier slices. Tokens are those of the slice.
            causal: whether `attend` is causal.
            options: arguments of `attend`, such as `scale`.

        Raises UsageError with "ring" for an `attend` that is neither `causal_attention` nor `full_attention`, and for
        dropout; with "all_to_all" for heads of queries that cannot be divided equally.
        """
        ranks, rank = self.group.size, self.group.rank
        join = join or _alone
        self._require_fits(query, attend, options)
        if ranks == 1 or isinstance(query, FakeTensor):  # of a module that is planned: no rank sends anything
            return attend(query, *join(key, value), **options)
        if self.exchange == "all_to_all":
            return _attention_by_heads(
                self.group, query, key, value, lambda own, *pair: attend(own, *join(*pair), **options)
            )
        if self.exchange == "ring":
            scale = options.get("scale")
            return ring_attention(self.group, query, *join(key, value), causal=causal, scale=scale)
        pair = torch.stack([key, value])
        keys, values = join(*exchanged(pair, self.group, _gathered_in_order, _sum_scattered_in_order))
        length, seen = query.shape[LENGTH] // 2, list[Tensor]()
        earlier = keys.shape[LENGTH] - 2 * ranks * length
        for part, own in zip((rank, 2 * ranks - 1 - rank), query.chunk(2, LENGTH), strict=True):
            if causal:
                end = earlier + (part + 1) * length
                seen.append(attend(own, keys.narrow(LENGTH, 0, end), values.narrow(LENGTH, 0, end), **options))
            else:
                seen.append(attend(own, keys, values, before=part * length, **options))
        return torch.cat(seen, LENGTH)

    def _require_fits(self, query: Tensor, attend: Attend, options: dict[str, Any]) -> None:
        ranks, heads = self.group.size, query.shape[HEADS]
        is_plain = attend in (causal_attention, full_attention) and not options.get("dropout_p")
        if self.exchange == "ring" and ranks > 1 and not is_plain:
            raise UsageError(
                'context_attention="ring" computes attention without dropout, windows, padding and packed documents '
                'alone: launch with context_attention="gather" or "all_to_all"'
            )
        if self.exchange == "all_to_all" and heads % ranks:
            raise UsageError(
                f'context_attention="all_to_all" divides heads over {ranks} context ranks, but there are {heads} on '
                'each tensor rank: launch with context_attention="gather" or "ring"'
            )


def _alone(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return key, value


def causal_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention by torch of the last tokens of a sequence, `query`, to all tokens up to them. `options` are arguments
    of `scaled_dot_product_attention`.
    """
    queries, keys = query.shape[LENGTH], key.shape[LENGTH]
    if _is_part_of_other(query, key):
        query = query.clone()  # else the memory of which it is a part would be kept with it
    if queries == keys:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if not options.get("dropout_p") and can_split(query, key, value):
        return attention_to_earlier(query, key, value, scale=options.get("scale"))
    if isinstance(query, FakeTensor):
        mask = query.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    else:
        with disable_current_modes():  # the mask has no values, and cannot be made where a mode sees operators
            mask = causal_lower_right(queries, keys)
    return functional.scaled_dot_product_attention(query, key, value, mask, **options)


def full_attention(query: Tensor, key: Tensor, value: Tensor, *, before: int = 0, **options: Any) -> Tensor:
    """Attention by torch of some tokens of a sequence, `query`, to all of its tokens, wherever the first query stands.
    `options` are arguments of `scaled_dot_product_attention`.
    """
    return functional.scaled_dot_product_attention(query, key, value, **options)


def _is_part_of_other(query: Tensor, key: Tensor) -> bool:
    """Whether queries lie in larger memory than their own, which the keys do not need."""
    if torch.compiler.is_compiling() or is_under_functorch():  # neither has memory that could be asked for
        return False
    return storage_key(query) != storage_key(key) and query.untyped_storage().nbytes() > query.nbytes


def _gathered_in_order(group: Group, pair: Tensor) -> Tensor:
    """The keys and values of all ranks, in the order of the sequence."""
    return _in_order(gathered(group, pair[None], 0), LENGTH + 1)


def _sum_scattered_in_order(group: Group, whole: Tensor) -> Tensor:
    """This rank's tokens of the sum over the ranks."""
    return sum_scattered(group, _by_rank(group, whole, LENGTH + 1), 0)[0]


def _in_order(parts: Tensor, dim: int) -> Tensor:
    """The tokens of all ranks, which lie along the first dimension, in the order of the sequence, along `dim` then."""
    first, second = parts.chunk(2, dim + 1)
    return torch.cat([*first, *second.flip(0)], dim)


def _by_rank(group: Group, whole: Tensor, dim: int) -> Tensor:
    """The tokens of each rank out of those of the sequence along `dim`, in a new first dimension."""
    return torch.stack([own_tokens(whole, rank, group.size, dim) for rank in range(group.size)])


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
    return _in_order(_swapped(group, parts), LENGTH)


def _tokens_of_all(group: Group, heads: Tensor) -> Tensor:
    """All heads of this rank's tokens, from all tokens of this rank's heads."""
    return _swapped(group, _by_rank(group, heads, LENGTH)).movedim(0, HEADS).flatten(HEADS, HEADS + 1)


def _swapped(group: Group, parts: Tensor) -> Tensor:
    """What each rank has for this one, of parts for each."""
    return start_all_to_all(group, parts, [1] * group.size, [1] * group.size)()


def ring_attention(
    group: Group, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Attention over context ranks, of which one at a time sends its keys and values to all others. While a rank
    computes with them, the next ones are under way. A broadcast stands for the c - 1 sends of a ring: it brings as
    much, and all ranks start the same calls in the same order.

    Args:
        group: the context ranks.
        query: (batch, heads, length, head size) of this rank's tokens, parts i and 2 c - 1 - i.
        key, value: the same, perhaps with fewer heads, each for as many heads of queries. In a slice of a sequence,
            they are behind those of earlier slices.
        causal: whether a token sees those up to its own alone.
        scale: factor of the scores; by default the head size to the power of -1/2.

    Returns the outputs of this rank's tokens, in their order.

    Raises UsageError in a backward with create_graph=True.
    """
    three = query, key, value
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (each.to(torch.get_autocast_dtype(query.device.type)) for each in three)
    three = by_shared_heads(query, key, value)
    output: Tensor = _Ring.apply(group, *three, causal, scale)  # type: ignore[no-untyped-call]  # torch's
    return output if three[0] is query else output.unflatten(0, (len(query), -1)).flatten(1, 2)


def _in_turn(group: Group, own: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each rank, and its keys and values. Those of the next one arrive meanwhile."""

    def start(source: int) -> tuple[Tensor, Work]:
        block = own if source == group.rank else torch.empty_like(own)
        return block, group.broadcast(block, source)

    coming = start(0)
    for source in range(group.size):
        block, work = coming
        work.wait()
        if source + 1 < group.size:
            coming = start(source + 1)
        yield source, block


class _Seen(NamedTuple):
    """Which tokens of this rank see which of a block: places of the first ones, and their numbers."""

    query: tuple[int, int]
    key: tuple[int, int]
    causal: bool

    @classmethod
    def of(cls, rank: int, source: int, tokens: int, keys: int, causal: bool = True) -> Iterator[_Seen]:
        """Of the block of rank `source`. Both ranks have so many tokens, half of them in each part. The block has so
        many `keys`: what it has before these tokens is of earlier slices, which all see.
        """
        earlier = keys - tokens
        half = tokens // 2
        if earlier:
            yield cls((0, tokens), (0, earlier), causal=False)
        if source == rank or not causal:
            yield cls((0, tokens), (earlier, tokens), causal=causal)
        elif source < rank:  # its first part lies before both of this rank, its second one behind both
            yield cls((0, tokens), (earlier, half), causal=False)
        else:
            yield cls((half, half), (earlier, tokens), causal=False)  # both lie between the two of this rank


class _Ring(Function):
    """`ring_attention`, with one head of keys for all heads of queries or as many."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> Tensor:
        found: Attended | None = None
        with torch.autocast(query.device.type, enabled=False):
            for source, block in _in_turn(group, torch.stack([key, value])):
                for seen in _Seen.of(group.rank, source, query.shape[LENGTH], key.shape[LENGTH], causal):
                    keys, values = block.narrow(LENGTH + 1, *seen.key)
                    new = attend(query.narrow(LENGTH, *seen.query), keys, values, causal=seen.causal, scale=scale)
                    if found is None:
                        found = Attended(new.output.to(new.logsumexp.dtype), new.logsumexp)
                    elif seen.query[0]:
                        for whole, part in zip(found, found.part(*seen.query).merged(new), strict=True):
                            whole.narrow(LENGTH, *seen.query).copy_(part)
                    else:
                        found = found.merged(new)
        assert found is not None
        output = found.output.to(query.dtype)
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        ctx.save_for_backward(query, key, value, output, found.logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None, None]:
        require_first_derivative()
        query, key, value, *saved = ctx.saved_tensors
        group, all_keys = ctx.group, Attended(*saved)
        of_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        own, last = torch.empty(0), list[tuple[Work, Tensor]]()
        with torch.autocast(query.device.type, enabled=False):
            for source, block in _in_turn(group, torch.stack([key, value])):
                of_block = torch.zeros_like(block)
                for seen in _Seen.of(group.rank, source, query.shape[LENGTH], key.shape[LENGTH], ctx.causal):
                    new, mine = (each.narrow(LENGTH, *seen.query) for each in (gradient, query))
                    keys, values = block.narrow(LENGTH + 1, *seen.key)
                    more, *others = gradients_of(
                        new, mine, keys, values, all_keys.part(*seen.query), causal=seen.causal, scale=ctx.scale
                    )
                    of_query.narrow(LENGTH, *seen.query).add_(more)
                    of_block.narrow(LENGTH + 1, *seen.key).copy_(torch.stack(others))
                own = of_block if source == group.rank else own
                for work, _ in last:
                    work.wait()
                last = [(group.reduce(of_block, source), of_block)]
        for work, _ in last:
            work.wait()
        return None, of_query.to(query.dtype), *own, None, None
