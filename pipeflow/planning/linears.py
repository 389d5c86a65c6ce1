"""Linears: those of a layer's attention, and what its windows leave. Must not contain: MLPs, kernels, bytes and times.

There are two kinds. Usually, one linear makes query, key and value, and heads of query may share a head of key and
value (arXiv 2305.13245). Latent attention (MLA, arXiv 2405.04434, section 2.1) first makes a latent vector for key and
value of `kv_rank` numbers, to which it adds `rope_size` numbers with positions that all heads share. A second linear
makes keys without positions and values of it. The query may have a latent vector of `q_rank` numbers, too. These
vectors have a norm each, and every tensor rank has them whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pipeflow.planning.blocks import Transformer


class Linear(NamedTuple):
    """A linear from `inputs` to `outputs` numbers per token. Tensor ranks split its outputs, its inputs, or nothing."""

    inputs: int
    outputs: int
    split: Literal["inputs", "outputs", "none"]

    @property
    def weights(self) -> int:
        """The number of its weights, on all tensor ranks together if they are split."""
        return self.inputs * self.outputs


def attention_linears(model: Transformer) -> tuple[Linear, ...]:
    """The linears of one layer's attention, in their order."""
    hidden, heads = model.hidden, model.heads
    out = Linear(heads * model.value_width, hidden, "inputs")
    if model.kv_rank is None:
        return Linear(hidden, model.query_width + 2 * model.key_width, "outputs"), out
    latent = model.kv_rank + model.rope_size
    made = heads * (model.head_width - model.rope_size + model.value_width)
    values = Linear(hidden, latent, "none"), Linear(model.kv_rank, made, "outputs")
    if model.q_rank is None:
        return Linear(hidden, model.query_width, "outputs"), *values, out
    queries = Linear(hidden, model.q_rank, "none"), Linear(model.q_rank, model.query_width, "outputs")
    return *queries, *values, out


def latent_values(model: Transformer) -> int:
    """Numbers per token in latent vectors: before and after their norms, and the positions of the key."""
    if model.kv_rank is None:
        return 0
    return 2 * (model.kv_rank + (model.q_rank or 0)) + model.rope_size


def latent_norms(model: Transformer) -> int:
    """The number of parameters of the norms of latent vectors."""
    return 0 if model.kv_rank is None else model.kv_rank + (model.q_rank or 0)


def seen(model: Transformer, sequence: int) -> float:
    """The part of the scores under a causal mask that the windows of the layers leave, as the mean of all layers. A
    query sees itself and `window` - 1 tokens before it; in each `full_every`th layer it sees all.
    """
    if model.window is None or model.window >= sequence:
        return 1.0
    part = model.window / sequence
    in_window, full = part * (2 - part), 1 / model.full_every if model.full_every else 0.0
    return full + (1 - full) * in_window
