"""Attention to blocks of keys, merged by the log-sum-exp of their scores. So no mask is kept, and no score is computed
that a mask would hide. Must not contain: how context ranks exchange keys.

Source: Dao et al., arXiv 2205.14135 (the backward of a block needs the output and the log-sum-exp over all keys alone).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pipeflow.core.errors import UsageError
from pipeflow.engine.torch_private.autograd import is_any_autocast_enabled, is_under_functorch
from pipeflow.engine.torch_private.tensors import CPU_FLASH, CPU_FLASH_BACKWARD

LENGTH = 2  # the dimension of tokens in (batch, heads, length, head size)


class Attended(NamedTuple):
    """What queries got from some of the keys.

    Attributes:
        output: (batch, heads, queries, head size).
        logsumexp: of the scores of each query, (batch, heads, queries); in float32 for 16-bit queries.
    """

    output: Tensor
    logsumexp: Tensor

    def merged(self, other: Attended) -> Attended:
        """What the queries get from the keys of both, in float32 at least."""
        total = torch.logaddexp(self.logsumexp, other.logsumexp)
        mine, its = (each.output * (each.logsumexp - total).exp().unsqueeze(-1) for each in (self, other))
        return Attended(mine.add_(its), total)

    def part(self, start: int, length: int) -> Attended:
        """What some of the queries got, in the same memory."""
        return Attended(*(each.narrow(LENGTH, start, length) for each in self))


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None = None) -> Attended:
    """Attention of queries to one block of keys. No gradients are recorded. Where torch has no kernel for it, all
    scores of the block are in memory.

    Args:
        query: (batch, heads, queries, head size).
        key, value: (batch, heads, keys, head size), or with one head for all heads of queries.
        causal: the block has the queries' own tokens, and each query sees those up to its own.
        scale: factor of the scores; by default the head size to the power of -1/2.
    """
    key, value = (each.expand(-1, query.shape[1], -1, -1) for each in (key, value))
    if CPU_FLASH is not None and _has_kernel(query, key, value):
        return Attended(*CPU_FLASH(query, key, value, 0.0, causal, scale=scale))
    scores = _scores(query, key, causal, scale)
    logsumexp = scores.logsumexp(-1)
    return Attended((scores - logsumexp.unsqueeze(-1)).exp().to(value.dtype) @ value, logsumexp)


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
    shared = key.shape[1] < query.shape[1]
    key, value = (each.expand(-1, query.shape[1], -1, -1) for each in (key, value))
    if CPU_FLASH_BACKWARD is not None and _has_kernel(query, key, value):
        found = CPU_FLASH_BACKWARD(gradient, query, key, value, *all_keys, 0.0, causal, scale=scale)
    else:
        found = _gradients(gradient, query, key, value, all_keys, causal, scale)
    of_query, of_key, of_value = found
    return (of_query, of_key.sum(1, True), of_value.sum(1, True)) if shared else found


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
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, all_keys: Attended, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `gradients_of` by torch's operators, with all scores of the block in memory."""
    weights = (_scores(query, key, causal, scale) - all_keys.logsumexp.unsqueeze(-1)).exp()
    seen = (gradient * all_keys.output).sum(-1, keepdim=True)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    of_scores = (weights * (gradient @ value.transpose(-1, -2) - seen) * factor).to(query.dtype)
    transposed = weights.to(gradient.dtype).transpose(-1, -2)
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, transposed @ gradient


def by_shared_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Makes the heads of queries that share a head of keys a sample of its own, so that no key is copied. The output
    has the heads of `query` again after `unflatten(0, (samples, -1)).flatten(1, 2)`.
    """
    shared = key.shape[1]
    if query.shape[1] == shared:
        return query, key, value
    key, value = (each.flatten(0, 1).unsqueeze(1) for each in (key, value))
    return query.unflatten(1, (shared, -1)).flatten(0, 1), key, value


def can_split(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attention_to_earlier` takes these: where torch has a kernel, and neither autocast nor a transform of
    torch.func changes what is computed.
    """
    return (
        _has_kernel(query, key, value)
        and query.shape[1] % key.shape[1] == 0
        and not is_any_autocast_enabled()
        and not is_under_functorch()
    )


def attention_to_earlier(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention of the last tokens of a sequence, `query`, to all tokens up to them: of a block of the tokens
    before the queries, and one of their own. For the backward, the arguments, the output and its log-sum-exp are kept.

    Args:
        query: (batch, heads, queries, head size).
        key, value: (batch, heads, length, head size). There may be fewer heads, each for as many heads of queries.
        scale: as of `attend`.

    Returns the output, (batch, heads, queries, head size).

    Raises UsageError in a backward with create_graph=True, since torch's kernel has no second derivative.
    """
    three = by_shared_heads(query, key, value)
    output: Tensor = _ToEarlier.apply(*three, scale)  # type: ignore[no-untyped-call]  # torch's
    return output if three[0] is query else output.unflatten(0, (len(query), -1)).flatten(1, 2)


def require_first_derivative() -> None:
    """Raises UsageError in a backward that records a graph for another one."""
    if torch.is_grad_enabled():
        raise UsageError(
            "attention by blocks has no second derivative: leave create_graph=True out, or use a schedule with "
            'slices=1 and context_attention="gather"'
        )


def _split(whole: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Keys or values before the queries, and those of the queries."""
    before = whole.shape[LENGTH] - queries
    return whole.narrow(LENGTH, 0, before), whole.narrow(LENGTH, before, queries)


class _ToEarlier(Function):
    """`attention_to_earlier`, with one head of keys for all heads of queries or as many."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        earlier, own = zip(*(_split(each, query.shape[LENGTH]) for each in (key, value)), strict=True)
        found = attend(query, *own, causal=True, scale=scale)
        if earlier[0].shape[LENGTH]:
            found = found.merged(attend(query, *earlier, causal=False, scale=scale))
        output = found.output.to(query.dtype)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, output, found.logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        require_first_derivative()
        query, key, value, *found = ctx.saved_tensors
        earlier, own = zip(*(_split(each, query.shape[LENGTH]) for each in (key, value)), strict=True)
        rest: Any = {"all_keys": Attended(*found), "scale": ctx.scale}
        of_query, *of_own = gradients_of(gradient, query, *own, causal=True, **rest)
        if not earlier[0].shape[LENGTH]:
            return of_query, of_own[0], of_own[1], None
        more, *of_earlier = gradients_of(gradient, query, *earlier, causal=False, **rest)
        of_key, of_value = (torch.cat(pair, LENGTH) for pair in zip(of_earlier, of_own, strict=True))
        return of_query.add_(more), of_key, of_value, None
