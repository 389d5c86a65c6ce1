"""What the stages of a GPT cost: the time, and the bytes kept, of one microbatch on each. What must not live here: the
order in which they run, and what follows from it.

Activations are those of arXiv 2205.05198 (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models"), section 4, with its dropouts; operations those of arXiv 2104.04473 (Narayanan et al.), section 5.1 and
appendix, where an activation function or a norm costs nothing. Below, s is the sequence, b the microbatch size, h
`hidden`, a the heads, r `mlp_ratio`, V the vocabulary and t the tensor size.
"""

from __future__ import annotations

import math

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.planning.partition import partition_uniform
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer import GPT, Part


def stage_layers(model: GPT, placement: Placement) -> list[Part]:
    """Per stage its layers [start, end), as even as can be. Raises UsageError for more stages than layers."""
    stages = placement.num_stages
    if stages > model.layers:
        raise UsageError(
            f"{model.layers} layers cannot fill {stages} stages on {placement.num_ranks} ranks: "
            f"use fewer ranks or chunks, at most {model.layers} stages"
        )
    return [part for [part] in partition_uniform(model.layers, stages)]


def stage_costs(model: GPT, placement: Placement, setup: Setup, *, flops: float | None = None) -> CostModel:
    """The costs of one microbatch on each stage, layers dealt as `stage_layers` does. Times are in seconds where
    `flops`, the operations per second of one device, is given, else in forwards of one layer; bytes are those of one
    device. Transfers are free.

    Raises UsageError for a model that the setup does not fit.
    """
    tokens = setup.microbatch_size * sequence_of(model, setup)
    if flops is not None and not (math.isfinite(flops) and flops > 0):
        raise UsageError(f"flops must be positive and finite, got {flops}: operations per second of one device")
    parts = stage_layers(model, placement)
    work = [_operations(model, setup, part) for part in parts]
    unit = layer_forward(model, setup) if flops is None else flops * setup.tensor / tokens
    return CostModel(
        forward=tuple(forward / unit for forward, _, _ in work),
        backward_input=tuple(backward / unit for _, backward, _ in work),
        backward_weight=tuple(weight / unit for _, _, weight in work),
        saved_bytes=tuple(tokens * _saved(model, setup, part) for part in parts),
        deferred_bytes=tuple(tokens * _deferred(model, setup, part) for part in parts),
    )


def layer_forward(model: GPT, setup: Setup) -> int:
    """Operations of one layer's forward per token, on all tensor ranks: 24h^2 (1 + s/6h) for r = 4."""
    return _linears(model) + _attention(model, setup)


def head_forward(model: GPT) -> int:
    """Operations per token of the head's forward, on all tensor ranks: 2hV."""
    return 2 * model.hidden * model.vocabulary


def recomputed_bytes(model: GPT, setup: Setup) -> int:
    """With `checkpoint`, what the backward of one layer makes anew while it runs, all but its input; else nothing."""
    tokens = setup.microbatch_size * sequence_of(model, setup)
    again = _layer_bytes(model, setup) - setup.precision.weight * _whole(model, setup)
    return tokens * again if setup.checkpoint else 0


def sequence_of(model: GPT, setup: Setup) -> int:
    """Tokens per sequence. Raises UsageError where the model has no place for them, or the setup cannot split it."""
    sequence = model.positions if setup.sequence is None else setup.sequence
    model.require_tensor(setup.tensor)
    if sequence > model.positions:
        raise UsageError(f"a sequence of {sequence} tokens is too long for a model with {model.positions} positions")
    if setup.sequence_parallel and sequence % setup.tensor:
        raise UsageError(f"a sequence of {sequence} tokens does not divide into {setup.tensor} parts: use a multiple")
    return sequence


def _linears(model: GPT) -> int:
    return 2 * (4 + 2 * model.mlp_ratio) * model.hidden**2


def _attention(model: GPT, setup: Setup) -> int:
    return 4 * sequence_of(model, setup) * model.hidden


def _operations(model: GPT, setup: Setup, part: Part) -> tuple[int, int, int]:
    """Per token, of F, I and W: a linear's two halves cost its forward each, attention's backward is all in I and costs
    twice its forward (arXiv 2401.10241, table 1). What is computed again, layers alone, is a part of I.
    """
    layers, linears, attention = part[1] - part[0], _linears(model), _attention(model, setup)
    head = head_forward(model) if part[1] == model.layers else 0
    again = layers * (linears + attention) if setup.checkpoint else 0
    forward = layers * (linears + attention) + head
    return forward, layers * (linears + 2 * attention) + head + again, layers * linears + head


def _whole(model: GPT, setup: Setup) -> int:
    """Numbers that a token has in what tensor ranks do not split: h, or h/t where they share it by sequence."""
    return model.hidden // setup.tensor if setup.sequence_parallel else model.hidden


def _layer_bytes(model: GPT, setup: Setup) -> int:
    """Bytes per token that a layer needs for its backward: h (10 + 24/t), with scores 5as/t more, in half precision.

    Whole on every tensor rank: what goes into the norms and the linears after them (4 values), and the masks of two
    dropouts (a byte each). Split: query, key, value, what goes into attention's output linear, and what goes into the
    GeLU and out of it (4 + 2r values). Scores: the softmax, its dropout's result and mask.
    """
    width = setup.precision.weight
    whole = (4 * width + 2) * _whole(model, setup)
    split = (4 + 2 * model.mlp_ratio) * width * model.hidden
    scores = (2 * width + 1) * model.heads * sequence_of(model, setup) if setup.keep_scores else 0
    return whole + (split + scores) // setup.tensor


def _saved(model: GPT, setup: Setup, part: Part) -> int:
    """Bytes per token from a forward to its backward: of each layer all that it needs, or its input alone; of the first
    stage the embedding's dropout mask, a byte; of the last what goes into its norm and its head, and the logits
    in float32 (section 4.3).
    """
    width, whole = setup.precision.weight, _whole(model, setup)
    kept = (part[1] - part[0]) * (width * whole if setup.checkpoint else _layer_bytes(model, setup))
    if part[0] == 0:
        kept += whole
    if part[1] == model.layers:
        kept += 2 * width * whole + 4 * model.vocabulary_rows(setup.tensor)
    return kept


def _deferred(model: GPT, setup: Setup, part: Part) -> int:
    """Bytes per token from I to W: what goes into each linear and the gradient of what comes out, 32h per layer in
    half precision (arXiv 2401.10241, table 1), checkpointed or not, since what I computed again W still needs; and of
    the tables the gradient of what comes out. With sequence parallelism a rank keeps its part and gathers the others.

    Whole on every tensor rank: what goes into query-key-value and wide, the gradients of the two outputs.
    """
    width, whole = setup.precision.weight, _whole(model, setup)
    layer = 4 * whole + (4 + 2 * model.mlp_ratio) * model.hidden // setup.tensor
    values = (part[1] - part[0]) * layer
    if part[0] == 0:
        values += whole
    if part[1] == model.layers:
        values += whole + model.vocabulary_rows(setup.tensor)
    return values * width
