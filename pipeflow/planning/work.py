"""DeviceWork: what one device computes in a layer, an embedding or a head, for one microbatch. Must not contain: rates
of devices, or times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeflow.planning.attention import FUSED_BACKWARD, Scores
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer import GPT
from pipeflow.planning.transformer_costs import sequence_of

SCORE_BYTES = 13  # per attention score in half precision: written, masked and normalised, dropped out, read again
WHOLE_VALUES = 11  # per token and `hidden`: two norms, two sums with a residual and their dropouts
ATTENTION_AGAIN = FUSED_BACKWARD - 2  # of the products of fused attention, that its backward computes again
ROUTED_VALUES = (
    4  # per expert of a token and `hidden`: read and written on the way to it, read and added on the way back
)
LOSS_PASSES = 8  # over the logits in float32, for the loss and again for its gradient
EMBEDDING_PASSES = 10  # over the embedding's output


class MatrixProduct(NamedTuple):
    """`repeats` matrix products of [rows, depth] by [depth, columns]."""

    rows: float
    columns: float
    depth: float
    repeats: float = 1

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them."""
        return 2.0 * self.rows * self.columns * self.depth * self.repeats


class DeviceWork(NamedTuple):
    """The forward of a part of the model on one device.

    Attributes:
        products: matrix products with weights; each has two products of the same size in the backward.
        attention_flops: operations of the products of queries, keys and values.
        again_flops: the part of `attention_flops` that the backward recomputes. Fused attention (FlashAttention, arXiv
            2205.14135) keeps no scores, so its backward has five products for two.
        moved_bytes: bytes that elementwise operations read and write; the backward moves twice as many.
        score_bytes: the same for attention scores, if they are stored.
        scores: the shape of attention. None: that of a fused kernel whose sequences are long.
    """

    products: tuple[MatrixProduct, ...]
    attention_flops: float = 0.0
    again_flops: float = 0.0
    moved_bytes: float = 0.0
    score_bytes: float = 0.0
    scores: Scores | None = None


def layer_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of one transformer layer, for one microbatch, on one of its tensor ranks."""
    sequence, tensor = sequence_of(model, setup), setup.tensor
    tokens, hidden, width = setup.microbatch_size * sequence, model.hidden, setup.precision.weight
    inner, keys = model.query_width / tensor, model.key_width / tensor
    is_stored, is_causal = setup.stores_scores, isinstance(model, GPT)
    is_skipped = is_causal and not is_stored  # fused attention skips what the causal mask leaves out
    attention = tokens * model.attention_flops(sequence) / tensor / (2 if is_skipped else 1)
    values = 2 * inner + 2 * keys + (3 if model.gated else 2) * model.active_experts * model.wide / tensor
    whole = hidden / tensor if setup.sequence_parallel else hidden
    routed = ROUTED_VALUES * model.experts_per_token * hidden if model.experts > 1 else 0
    return DeviceWork(
        (
            MatrixProduct(tokens, inner + 2 * keys, hidden),
            MatrixProduct(tokens, hidden, inner),
            *_perceptrons(model, tokens, tensor),
        ),
        attention_flops=attention,
        again_flops=0.0 if is_stored else attention * ATTENTION_AGAIN,
        moved_bytes=width * tokens * (WHOLE_VALUES * whole + values + routed),
        score_bytes=tokens * sequence * model.heads / tensor * SCORE_BYTES * width / 2 if is_stored else 0.0,
        scores=Scores(setup.kernel, sequence, model.head_width, is_causal),
    )


def _perceptrons(model: Transformer, tokens: float, tensor: int) -> Iterator[MatrixProduct]:
    wide, matrices, hidden = model.wide / tensor, 2 if model.gated else 1, model.hidden
    if model.experts > 1:
        yield MatrixProduct(tokens, model.experts, hidden)  # the router
    routed = tokens * model.experts_per_token / model.experts
    for rows, count in ((routed, model.experts), (tokens, model.shared_experts)):
        if count:
            yield MatrixProduct(rows, matrices * wide, hidden, count)
            yield MatrixProduct(rows, hidden, wide, count)


def embedding_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of the part before the layers."""
    tokens = setup.microbatch_size * sequence_of(model, setup)
    reading = MatrixProduct(tokens, model.hidden, model.embedding_flops / (2 * model.hidden))
    moved = EMBEDDING_PASSES * setup.precision.weight * tokens * model.hidden
    return DeviceWork((reading,) if reading.flops else (), moved_bytes=moved)


def head_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of the head and the loss, whose backward moves as much as its forward."""
    tokens, outputs = setup.microbatch_size * sequence_of(model, setup), model.head_outputs(setup.tensor)
    return DeviceWork((MatrixProduct(tokens, outputs, model.hidden),), moved_bytes=LOSS_PASSES * 4.0 * tokens * outputs)
