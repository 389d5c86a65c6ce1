"""Attention to blocks of keys, merged by the log-sum-exp of their scores. So no mask is kept, and no score is computed
that a mask would hide. A block may come from another context rank. Must not contain: other exchanges of context ranks.

Source: Dao et al., arXiv 2205.14135 (the backward of a block needs the output and the log-sum-exp over all keys alone).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.past import TOKENS
from pipeflow.engine.parallel.transport.protocol import Group, Work
from pipeflow.engine.torch_private.autograd import is_any_autocast_enabled, is_under_functorch
from pipeflow.engine.torch_private.tensors import CPU_FLASH, CPU_FLASH_BACKWARD

HEADS = 1  # the dimension in (batch, heads, tokens, head size)


class Attended(NamedTuple):
    """What queries got from some of the keys.

    Attributes:
        output: (batch, heads, queries, head size).
        logsumexp: of the scores of each query, (batch, heads, queries, 1); in float32 for 16-bit queries.
    """

    output: Tensor
    logsumexp: Tensor

    def merged(self, other: Attended) -> Attended:
        """What the queries get from the keys of both, in float32 at least."""
        total = torch.logaddexp(self.logsumexp, other.logsumexp)
        mine, its = (each.output * (each.logsumexp - total).exp() for each in (self, other))
        return Attended(mine.add_(its), total)

    def part(self, start: int, length: int) -> Attended:
        """What some of the queries got, in the same memory."""
        return Attended(*(each.narrow(TOKENS, start, length) for each in self))


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None = None) -> Attended:
    """Attention of queries to one block of keys. No gradients are recorded. Where torch has no kernel for it, all
    scores of the block are in memory.

    Args:
        query: (batch, heads, queries, head size).
        key, value: (batch, heads, keys, head size), or with one head for all heads of queries.
        causal: the block has the queries' own tokens, and each query sees those up to its own.
        scale: factor of the scores; by default the head size to the power of -1/2.
    """
    key, value = (each.expand(-1, query.shape[HEADS], -1, -1) for each in (key, value))
    if CPU_FLASH is not None and _has_kernel(query, key, value):
        output, logsumexp = CPU_FLASH(query, key, value, 0.0, causal, scale=scale)
        return Attended(output, logsumexp.unsqueeze(-1))
    scores = _scores(query, key, causal, scale)
    logsumexp = scores.logsumexp(-1, keepdim=True)
    return Attended((scores - logsumexp).exp().to(value.dtype) @ value, logsumexp)


def gradients_of(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    all_keys: Attended,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values that one block of keys adds.

    Args:
        gradient: that of the output, (batch, heads, queries, head size).
        query, key, value, causal, scale: as of `attend`.
        all_keys: what the queries got from all blocks.
    """
    shared = key.shape[HEADS] < query.shape[HEADS]
    key, value = (each.expand(-1, query.shape[HEADS], -1, -1) for each in (key, value))
    if CPU_FLASH_BACKWARD is not None and _has_kernel(query, key, value):
        output, logsumexp = all_keys
        found = CPU_FLASH_BACKWARD(gradient, query, key, value, output, logsumexp.squeeze(-1), 0.0, causal, scale=scale)
    else:
        found = _gradients(gradient, query, key, value, all_keys, causal, scale)
    of_query, of_key, of_value = found
    return (of_query, of_key.sum(HEADS, True), of_value.sum(HEADS, True)) if shared else found


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's kernel for CPUs takes these: plain tensors of one dtype and head size."""
    three = query, key, value
    return (
        CPU_FLASH is not None
        and all(type(each) is Tensor and each.device.type == "cpu" and each.stride(-1) == 1 for each in three)
        and query.is_floating_point()
        and len({(each.dtype, each.shape[-1]) for each in three}) == 1
        and query.numel() > 0
    )


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * factor
    return scores.masked_fill(~seen_keys(query, key.shape[TOKENS]), float("-inf")) if causal else scores


def seen_keys(
    query: Tensor, keys: int, *, before: int | None = None, reach: int | None = None, later: int = 0
) -> Tensor:
    """Which keys each query of a sequence sees, (queries, keys), as bool.

    Args:
        query: (..., queries, head size).
        keys: the number of keys.
        before: how many keys stand before that of the first query; by default the last query is at the last key.
        reach: how many keys up to its own a query sees; by default all.
        later: how many keys behind its own a query sees.
    """
    queries = query.shape[TOKENS]
    before = keys - queries if before is None else before
    seen = query.new_ones(queries, keys, dtype=torch.bool).tril(before + later)
    return seen if reach is None else seen.triu(before - reach + 1)


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, all_keys: Attended, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `gradients_of` by torch's operators, with all scores of the block in memory."""
    weights = (_scores(query, key, causal, scale) - all_keys.logsumexp).exp()
    seen = (gradient * all_keys.output).sum(-1, keepdim=True)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    of_scores = (weights * (gradient @ value.transpose(-1, -2) - seen) * factor).to(query.dtype)
    transposed = weights.to(gradient.dtype).transpose(-1, -2)
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, transposed @ gradient


def has_block_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attention_by_blocks` computes these by a kernel of torch, and neither autocast nor a transform of
    torch.func changes what is computed.
    """
    return (
        _has_kernel(query, key, value)
        and query.shape[HEADS] % key.shape[HEADS] == 0
        and not is_any_autocast_enabled()
        and not is_under_functorch()
    )


def attention_by_blocks(
    group: Group, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Attention of the last tokens of a sequence, `query`, to a block of the tokens before them, and one of their own.
    For the backward, the arguments, the output and its log-sum-exp are kept.

    Over context ranks, one rank at a time sends its keys and values to all others. While a rank computes with them, the
    next ones are under way. A broadcast stands for the c - 1 sends of a ring: it brings as much, and all ranks start
    the same calls in the same order.

    Args:
        group: the context ranks.
        query: (batch, heads, queries, head size) of this rank's tokens, parts i and 2 c - 1 - i.
        key, value: (batch, heads, tokens, head size) of the same tokens, behind those of earlier slices. There may be
            fewer heads, each for as many heads of queries.
        causal: whether a token sees those up to its own alone.
        scale: as of `attend`.

    Returns the outputs of this rank's tokens, in their order.

    Raises UsageError in a backward with create_graph=True, since torch's kernel has no second derivative.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    own, shared = query, key.shape[HEADS]
    if shared != query.shape[HEADS]:  # heads of queries that share one become a sample, so that no key is copied
        own = query.unflatten(HEADS, (shared, -1)).flatten(0, 1)
        key, value = (each.flatten(0, 1).unsqueeze(HEADS) for each in (key, value))
    output: Tensor = _ByBlocks.apply(group, own, key, value, causal, scale)  # type: ignore[no-untyped-call]  # torch's
    return output.reshape(query.shape)


def _in_turn(group: Group, key: Tensor, value: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Each rank, and its keys and values. Those of the next one arrive meanwhile."""
    if group.size == 1:
        yield 0, (key, value)
        return
    own = torch.stack([key, value])

    def start(source: int) -> tuple[Tensor, Work]:
        block = own if source == group.rank else torch.empty_like(own)
        return block, group.broadcast(block, source)

    coming = start(0)
    for source in range(group.size):
        block, work = coming
        work.wait()
        if source + 1 < group.size:
            coming = start(source + 1)
        yield source, block.unbind()


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


class _ByBlocks(Function):
    """`attention_by_blocks`, with one head of keys for all heads of queries or as many."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> Tensor:
        found: Attended | None = None
        with torch.autocast(query.device.type, enabled=False):
            for source, block in _in_turn(group, key, value):
                for seen in _Seen.of(group.rank, source, query.shape[TOKENS], key.shape[TOKENS], causal):
                    keys, values = (each.narrow(TOKENS, *seen.key) for each in block)
                    new = attend(query.narrow(TOKENS, *seen.query), keys, values, causal=seen.causal, scale=scale)
                    if found is None:
                        found = Attended(new.output.to(new.logsumexp.dtype), new.logsumexp)
                    elif seen.query[0]:
                        for whole, part in zip(found, found.part(*seen.query).merged(new), strict=True):
                            whole.narrow(TOKENS, *seen.query).copy_(part)
                    else:
                        found = found.merged(new)
        assert found is not None
        output = found.output.to(query.dtype)
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        ctx.save_for_backward(query, key, value, output, found.logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():  # the backward records a graph for another one
            raise UsageError(
                "attention by blocks has no second derivative: leave create_graph=True out, or use a schedule with "
                'slices=1 and context_attention="gather"'
            )
        query, key, value, *saved = ctx.saved_tensors
        group, all_keys = ctx.group, Attended(*saved)
        of_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        own, last = torch.empty(0), list[tuple[Work, Tensor]]()
        with torch.autocast(query.device.type, enabled=False):
            for source, block in _in_turn(group, key, value):
                of_block = key.new_zeros(2, *key.shape)
                for seen in _Seen.of(group.rank, source, query.shape[TOKENS], key.shape[TOKENS], ctx.causal):
                    new, mine = (each.narrow(TOKENS, *seen.query) for each in (gradient, query))
                    keys, values = (each.narrow(TOKENS, *seen.key) for each in block)
                    more, *others = gradients_of(
                        new, mine, keys, values, all_keys.part(*seen.query), causal=seen.causal, scale=ctx.scale
                    )
                    of_query.narrow(TOKENS, *seen.query).add_(more)
                    for whole, part in zip(of_block, others, strict=True):
                        whole.narrow(TOKENS, *seen.key).copy_(part)
                own = of_block if source == group.rank else own
                for work, _ in last:
                    work.wait()
                last = [(group.reduce(of_block, source), of_block)]
        for work, _ in last:
            work.wait()
        return None, of_query.to(query.dtype), *own, None, None
