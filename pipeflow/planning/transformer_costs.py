"""The costs of a transformer's stages: the time, and the bytes kept, of one microbatch on each. Must not contain: the
order in which they run, and what follows from it.

Activations are counted as in arXiv 2205.05198 (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models"), section 4, with its dropouts. Operations are counted as in arXiv 2104.04473 (Narayanan et al.),
section 5.1 and appendix, where an activation function or a norm costs nothing.

Below, s is the sequence, b the microbatch size, h `hidden`, a the number of heads, r the MLP's width / h, V the
vocabulary and t the tensor size. Formulas with these letters are for a GPT whose heads all have their own key and
value, and whose MLP has two matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut, stage_parts
from pipeflow.core.placement import Placement
from pipeflow.planning.block_sizes import near_divisors
from pipeflow.planning.blocks import Part, Transformer
from pipeflow.planning.engines import engine_named
from pipeflow.planning.kept import KeptPerToken, keeps_input, layer_values, normed_inputs, op_values, wide_values
from pipeflow.planning.linears import attention_linears
from pipeflow.planning.recomputation import freed_bytes, recomputed_flops
from pipeflow.planning.setup import Setup

T = TypeVar("T")
ON_THEIR_WAY = 2  # offloaded layers whose values are on the device: one leaves it or comes back while one computes


class Share(NamedTuple):
    """The share of a model that stages hold together: shares that are equal cost the same.

    Attributes:
        layers: number of layers.
        first: whether the part before the layers belongs to it.
        last: whether the part after the layers belongs to it.
        dense: the number of its layers that are without experts in a model that has some.
    """

    layers: int
    first: bool
    last: bool
    dense: int = 0

    def kinds(self, model: Transformer, setup: Setup) -> list[tuple[int, Transformer, Setup]]:
        """How many of its layers are as those of which model and setup: in the latter, all layers have a checkpoint or
        none has, and all of them are offloaded or none is. The last share also has the layers that predict further
        tokens.
        """
        checkpointed = self.layers if setup.checkpoint_layers is None else min(setup.checkpoint_layers, self.layers)
        offloaded = min(max(0, setup.offload_layers - ON_THEIR_WAY), self.layers)
        borders = sorted({0, self.dense, checkpointed, offloaded, self.layers})
        found: list[tuple[int, Transformer, Setup]] = []
        for start, end in pairwise(borders):
            each = setup
            if setup.checkpoint_layers is not None or setup.offload_layers:
                kept = setup.checkpoint if start < checkpointed else "none"
                each = replace(setup, checkpoint=kept, checkpoint_layers=None, offload_layers=int(start < offloaded))
            found.append((end - start, model.dense if start < self.dense else model, each))
        if self.last and model.further_layers:
            found.append((model.further_layers, model, replace(setup, checkpoint_layers=None, offload_layers=0)))
        return found


def stage_layers(model: Transformer, placement: Placement, cut: Cut = "uniform") -> list[Part]:
    """Per stage its layers [start, end): by default as even as possible, otherwise by `stage_parts`. With one stage
    more than layers, the last stage has no layers; with two more, the first stage has none either. These stages hold
    what follows and precedes the layers, as in Llama 3 (arXiv 2407.21783, section 3.3.2). In a cut of parts, any stage
    may have no layers; a stage between the first and the last then only passes on what it receives.

    Raises UsageError for more stages than that without a cut of parts, and as `stage_parts`.
    """
    stages, layers = placement.num_stages, model.layers
    if not isinstance(cut, str) and len(cut) == stages and (parts := _covering(cut, layers)):
        return parts
    if stages > layers + 2:
        raise UsageError(
            f"{layers} layers cannot fill {stages} stages on {placement.num_ranks} ranks: use fewer ranks or chunks, "
            f"at most {layers + 2} stages, of which the first and the last have no layers"
        )
    if isinstance(cut, str) and stages > layers:
        ends = [(0, 0), (layers, layers)]
        return [*ends[: stages - layers - 1], *((layer, layer + 1) for layer in range(layers)), ends[1]]
    return stage_parts(layers, stages, cut)


def _covering(cut: Sequence[float] | Sequence[Part], layers: int) -> list[Part]:
    """The parts of a cut if each starts where the one before ends and they cover the layers, otherwise none."""
    parts = [(each[0], each[1]) for each in cut if isinstance(each, Sequence) and len(each) == 2]
    steps = [0, *(end for part in parts for end in part), layers]
    follows = all(one == other for one, other in zip(steps[::2], steps[1::2], strict=True))
    return parts if len(parts) == len(cut) and follows and all(start <= end for start, end in parts) else []


def shares_of(model: Transformer, parts: Sequence[Part]) -> list[Share]:
    """Per stage its share. `parts` are the layers of all stages."""
    last = len(parts) - 1
    return [
        Share(part[1] - part[0], stage == 0, stage == last, model.dense_of(part)) for stage, part in enumerate(parts)
    ]


class Parameters(NamedTuple):
    """How many parameters a device has: `experts` are those of experts that tokens are sent to, `others` the rest."""

    others: int
    experts: int

    @property
    def total(self) -> int:
        """How many there are of both kinds."""
        return self.others + self.experts


def parameters_of(model: Transformer, shares: Iterable[Share], setup: Setup) -> Parameters:
    """Parameters of a device that holds these shares together."""
    layers, firsts, lasts, denses = zip(*shares, strict=True)
    others = model.parameters_held(sum(layers), setup.tensor, first=any(firsts), last=any(lasts), dense=sum(denses))
    each = model.expert_parameters(setup.expert, setup.expert_split)
    return Parameters(others, (sum(layers) - sum(denses) + any(lasts) * model.further_layers) * each)


def for_shares(model: Transformer, parts: Sequence[Part], of: Callable[[Share], T]) -> list[T]:
    """`of` the share of each stage, computed once for each that differs."""
    shares = shares_of(model, parts)
    found = {share: of(share) for share in set(shares)}
    return [found[share] for share in shares]


def stage_costs(
    model: Transformer, placement: Placement, setup: Setup, *, flops: float | None = None, cut: Cut = "uniform"
) -> CostModel:
    """The costs of one microbatch on each stage, with the layers of `stage_layers`. Times are in seconds if `flops`,
    the operations per second of one device, is given, otherwise in forwards of one layer. Bytes are those of one
    device. Transfers are free.

    Raises UsageError for a model that the setup does not fit.
    """
    tokens = tokens_of(model, setup)
    if flops is not None and not (math.isfinite(flops) and flops > 0):
        raise UsageError(f"flops must be positive and finite, got {flops}: operations per second of one device")
    parts = stage_layers(model, placement, cut)
    work = for_shares(model, parts, lambda share: _operations(model, setup, share))
    unit = layer_forward(model, setup) if flops is None else flops * setup.tensor / tokens
    return CostModel(
        forward=tuple(forward / unit for forward, _, _ in work),
        backward_input=tuple(backward / unit for _, backward, _ in work),
        backward_weight=tuple(weight / unit for _, _, weight in work),
        saved_bytes=tuple(for_shares(model, parts, lambda share: tokens * _saved(model, setup, share))),
        deferred_bytes=tuple(for_shares(model, parts, lambda share: tokens * _deferred(model, setup, share))),
        unit="" if flops is None else "s",
    )


def layer_forward(model: Transformer, setup: Setup) -> int:
    """Operations of one layer's forward per token, on all tensor ranks: 24h^2 (1 + s/6h) for r = 4."""
    return model.linear_flops + model.attention_flops(sequence_of(model, setup))


def head_forward(model: Transformer) -> float:
    """Operations per token of the head's forward, on all tensor ranks: 2hV."""
    return model.head_flops


def recomputed_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes that the backward of one layer recomputes while it runs: with "full" recomputation everything that the
    layer needs except its input, with "op" all that it does not keep. With "selective" recomputation its scores, if
    they are stored, and what its modules make again.
    """
    tokens = tokens_of(model, setup)
    if setup.checkpoint in ("full", "op"):
        return max(0, tokens * (_layer_bytes(model, setup) - layer_kept(model, replace(setup, offload_layers=0))))
    scores = _score_bytes(model, setup) if setup.checkpoint == "selective" else 0
    return tokens * (scores + freed_bytes(model, setup))


def gradient_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes of gradients of activations while the backward of one layer runs: those of the layer's output, which tensor
    ranks have whole, and of its wide linears' outputs.
    """
    return tokens_of(model, setup) * setup.precision.weight * (model.hidden + wide_values(model, setup))


def sequence_of(model: Transformer, setup: Setup) -> int:
    """Tokens per sequence. Raises UsageError where the model has no place for them, or the setup cannot split it."""
    sequence = model.tokens if setup.sequence is None else setup.sequence
    model.require_tensor(setup.tensor)
    model.require_sequence(sequence)
    parts = setup.context * (setup.tensor if setup.sequence_parallel else 1)
    if sequence % parts:
        raise UsageError(f"a sequence of {sequence} tokens does not divide into {parts} parts: use a multiple")
    heads = model.heads // setup.tensor
    if setup.context_kind == "all-to-all" and heads % setup.context:
        near = near_divisors(heads, setup.context)
        raise UsageError(f"context={setup.context} ranks do not divide the {heads} heads of a tensor rank: {near}")
    return sequence


def tokens_of(model: Transformer, setup: Setup) -> int:
    """Tokens of a microbatch on one device: its context ranks share them. Raises UsageError as `sequence_of`."""
    return setup.microbatch_size * sequence_of(model, setup) // setup.context


def passed_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes of what a stage passes to the next one for a microbatch; its gradient has as many."""
    return tokens_of(model, setup) * _whole(model, setup) * setup.precision.weight


def _operations(model: Transformer, setup: Setup, share: Share) -> tuple[float, float, float]:
    """Operations per token of F, I and W. Each half of a linear's backward costs as much as its forward. Attention's
    backward is all in I and costs twice its forward (arXiv 2401.10241, table 1). Recomputation, which layers alone
    have, is a part of I. A linear that reads the batch needs no I.
    """
    linears = attention = again = 0
    attended = model.attention_flops(sequence_of(model, setup))
    for layers, kind, each in share.kinds(model, setup):
        linears += layers * kind.linear_flops
        attention += layers * attended
        kept = {"selective": attended, "full": kind.linear_flops + attended}.get(str(each.checkpoint), 0)
        again += layers * (kept + recomputed_flops(kind, each, sequence_of(model, setup)))
    first = model.embedding_flops if share.first else 0
    last = head_forward(model) if share.last else 0
    forward = first + linears + attention + last
    weights = 0 if setup.frozen else first + linears + last
    return forward, linears + 2 * attention + last + again, weights


def _whole(model: Transformer, setup: Setup) -> int:
    """Numbers per token in tensors that tensor ranks do not split: h, or h/t with sequence parallelism."""
    return model.hidden // setup.tensor if setup.sequence_parallel else model.hidden


def _score_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes per token of attention's scores in memory: 5as/t in half precision, with dropout: the softmax, the
    dropout's result and its mask.
    """
    width = 2 * setup.precision.weight + 1 if model.dropout else setup.precision.weight
    return width * model.heads * sequence_of(model, setup) // setup.tensor if setup.stores_scores else 0


def _inputs(model: Transformer, setup: Setup) -> int:
    """Numbers per token of a linear's input that is kept after a norm: with sequence parallelism, the device's part."""
    return model.hidden if engine_named(setup.engine).gathers_inputs else _whole(model, setup)


def _layer_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes per token that a layer needs for its backward: h (10 + 24/t), with scores 5as/t more, in half precision.

    Whole on every tensor rank: what goes into the norms and the linears after them (4 values), and the masks of two
    dropouts (a byte each).
    """
    norms = KeptPerToken(2 * _whole(model, setup), normed_inputs(setup) * _inputs(model, setup)).bytes(setup.precision)
    masks = 2 * model.dropout * _whole(model, setup)
    return norms + masks + layer_values(model, setup).bytes(setup.precision) + _score_bytes(model, setup)


def _saved(model: Transformer, setup: Setup, share: Share) -> float:
    """Bytes per token that are kept from a forward to its backward. A layer keeps everything that it needs except
    recomputed scores, or only its input. The first stage keeps the embedding's dropout mask, with a byte per number.
    The last stage keeps the inputs of its norm and its head, and the logits in float32 (section 4.3). What engines
    keep besides is in `engines.py`.
    """
    width, whole = setup.precision.weight, _whole(model, setup)
    kept: float = sum(layers * layer_kept(kind, each) for layers, kind, each in share.kinds(model, setup))
    if share.first:
        kept += whole * model.dropout
    if share.last:
        inputs = 0 if setup.frozen else _inputs(model, setup)
        kept += (1 + model.further_layers) * (width * (whole + inputs) + 4 * model.head_outputs(setup.tensor))
    elif engine_named(setup.engine).keeps_outputs:
        kept += width * whole
    if not share.first and share.layers and engine_named(setup.engine).buffers_all:
        kept -= width * whole  # the first layer's input is in a buffer, which transfers have
    return kept


def layer_kept(model: Transformer, setup: Setup) -> int:
    """Bytes per token that a layer keeps on its device from its forward to its backward."""
    if setup.offload_layers:
        return 0
    if setup.checkpoint == "full":
        return setup.precision.weight * _whole(model, setup)
    if setup.checkpoint == "op":
        return op_values(model, setup).bytes(setup.precision)
    scores = _score_bytes(model, setup) if setup.checkpoint == "selective" else 0
    return _layer_bytes(model, setup) - scores - freed_bytes(model, setup)


def _deferred(model: Transformer, setup: Setup, share: Share) -> float:
    """Bytes per token that are kept from I to W. These are the input of each linear and the gradient of its output, 32h
    per layer in half precision (arXiv 2401.10241, table 1). Recomputation does not change them, since W still needs
    what I recomputed. Tables keep the gradient of their output. With sequence parallelism a rank keeps its part and
    gathers the others.

    The inputs of the query-key-value and wide linears, and the gradients of the two outputs, are whole on every tensor
    rank.
    """
    width, whole = setup.precision.weight, _whole(model, setup)
    if setup.frozen:
        return width * sum(layers * _adapted_values(kind, setup) for layers, kind, _ in share.kinds(model, setup))
    values: float = sum(
        layers * (4 * whole + layer_values(kind, setup).numbers) for layers, kind, _ in share.kinds(model, setup)
    )
    if share.first:
        values += whole
    if share.last:
        values += (1 + model.further_layers) * (whole + model.head_outputs(setup.tensor))
    return values * width


def _adapted_values(model: Transformer, setup: Setup) -> float:
    """Numbers per token that the adapters of a layer keep from I to W: the inputs of the linears that have one, and the
    gradients of their outputs.
    """
    if not setup.lora_rank:
        return 0
    whole, kept = _whole(model, setup), layer_values(model, setup)
    made = sum(linear.outputs for linear in attention_linears(model)[:-1]) / setup.tensor
    outputs = {"linear_qkv": made, "linear_fc1": wide_values(model, setup), "linear_proj": whole, "linear_fc2": whole}
    attended = model.heads // setup.tensor * model.value_width * keeps_input(setup, "linear_proj")
    inputs = normed_inputs(setup) * whole + kept.inputs + attended
    return inputs + sum(outputs[target] for target in setup.lora_targets)
