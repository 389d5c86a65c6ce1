"""Attention to blocks of keys, whose results are merged by their log-sum-exp: so neither a mask is kept, nor is a score
computed that it would hide. Must not contain: where the blocks come from.

Source: Dao et al., arXiv 2205.14135 (the backward of a block needs the output and the log-sum-exp of all keys alone).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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

    def with_block(self, other: Attended) -> Attended:
        """What the queries get from both blocks of keys."""
        total = torch.logaddexp(self.logsumexp, other.logsumexp)
        parts = (each.output * (each.logsumexp - total).exp().unsqueeze(-1) for each in (self, other))
        return Attended(sum(parts).to(self.output.dtype), total)


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend` takes these: plain tensors in the memory of a CPU, of one dtype and head size."""
    three = query, key, value
    return (
        CPU_FLASH is not None
        and all(type(each) is Tensor and each.device.type == "cpu" and each.stride(-1) == 1 for each in three)
        and query.is_floating_point()
        and len({(each.dtype, each.shape[-1]) for each in three}) == 1
        and query.dim() == 4
        and query.numel() > 0
        and query.shape[1] % key.shape[1] == 0
        and not is_any_autocast_enabled()
        and not is_under_functorch()
    )


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None = None) -> Attended:
    """Attention of queries to one block of keys. No gradients are recorded.

    Args:
        query, key, value: (batch, heads, length, head size), of which `can_attend` is true.
        causal: the block has the queries' own tokens, and each query sees those up to its own.
        scale: factor of the scores; by default the head size to the power of -1/2.
    """
    assert CPU_FLASH is not None
    return Attended(*CPU_FLASH(query, key, value, 0.0, causal, scale=scale))


def gradients_of(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, all_keys: Attended, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values that one block of keys adds.

    Args:
        gradient: that of the output, of any strides.
        query, key, value, causal, scale: as of `attend`.
        all_keys: what the queries got from all blocks.
    """
    assert CPU_FLASH_BACKWARD is not None
    found: tuple[Tensor, Tensor, Tensor] = CPU_FLASH_BACKWARD(
        gradient, query, key, value, *all_keys, 0.0, causal, scale=scale
    )
    return found


def attention_to_earlier(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention of the last tokens of a sequence, `query`, to all tokens up to them: of a block of the tokens
    before the queries, and one of their own. For the backward, the arguments, the output and its log-sum-exp are kept.

    Args:
        query, key, value: (batch, heads, length, head size), of which `can_attend` is true. There may be fewer heads of
            keys and values, each for as many heads of queries.
        scale: as of `attend`.

    Returns the output, (batch, heads, queries, head size).

    Raises RuntimeError in a backward of the backward, of which torch has no kernel.
    """
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared:  # the kernel reads the same keys for several heads, without copies
        query = query.unflatten(1, (shared, -1)).flatten(0, 1)
        key, value = (each.flatten(0, 1).unsqueeze(1).expand(-1, heads // shared, -1, -1) for each in (key, value))
    output: Tensor = _ToEarlier.apply(query, key, value, scale)  # type: ignore[no-untyped-call]  # torch's
    return output if heads == shared else output.unflatten(0, (-1, shared)).flatten(1, 2)


def _split(whole: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Keys or values before the queries, and those of the queries."""
    before = whole.shape[LENGTH] - queries
    return whole.narrow(LENGTH, 0, before), whole.narrow(LENGTH, before, queries)


class _ToEarlier(Function):
    """`attention_to_earlier`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        (key_before, own_key), (value_before, own_value) = (_split(each, query.shape[LENGTH]) for each in (key, value))
        found = attend(query, own_key, own_value, causal=True, scale=scale)
        if key_before.shape[LENGTH]:
            found = found.with_block(attend(query, key_before, value_before, causal=False, scale=scale))
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, *found)
        return found.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *found = ctx.saved_tensors
        (key_before, own_key), (value_before, own_value) = (_split(each, query.shape[LENGTH]) for each in (key, value))
        rest: Any = {"all_keys": Attended(*found), "scale": ctx.scale}
        of_query, *own = gradients_of(gradient, query, own_key, own_value, causal=True, **rest)
        if not key_before.shape[LENGTH]:
            return of_query, *own, None
        more, *earlier = gradients_of(gradient, query, key_before, value_before, causal=False, **rest)
        both = (torch.cat(pair, LENGTH) for pair in zip(earlier, own, strict=True))
        return of_query.add_(more), *both, None
