"""Kept: the bytes per token that a layer keeps for its backward, what its backward makes again, and what stages keep.
Must not contain: how long it takes to make something again.

Activations are counted as in arXiv 2205.05198 (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models"), section 4, with its dropouts. In formulas, s is the sequence, b the microbatch size, h `hidden`, a
the number of heads, r the MLP's width / h, V the vocabulary and t the tensor size. They are for a GPT whose heads all
have their own key and value, and whose MLP has two matrices.

In 8 or 4 bits, a linear keeps its input in the type of its products, since its weight gradient is a product of it
(Transformer Engine). Everything else stays as wide as weights are: what goes into norms, query, key and value, the
output of attention, which the linear after it keeps once more in its own type, and the outputs of wide linears, from
which the activation function's gradient follows.

The modules of a layer that a backward may compute again have the names of Megatron-LM's `--recompute-modules`:
attention between its linears (core_attn), norms (layernorm), the linears that make query, key and value of latent
vectors (mla_up_proj), MLPs of layers without experts (mlp), experts with their router and the way of tokens there and
back (moe), their activation functions alone (moe_act), and shared experts. A checkpoint "op" chooses single products
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import sub
from typing import NamedTuple

from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.planning.blocks import Linear, Transformer
from pipeflow.planning.engines import engine_named
from pipeflow.planning.scans import scan_kept, scan_made
from pipeflow.planning.setup import Precision, Setup
from pipeflow.planning.shares import Share, sequence_of, tokens_of, whole_values


class KeptPerToken(NamedTuple):
    """Numbers per token: those as wide as weights, and inputs of linears. `again` are those of the former that a linear
    keeps once more if its inputs are narrower.
    """

    plain: int
    inputs: int = 0
    again: int = 0

    def bytes(self, precision: Precision) -> int:
        """Their bytes in a precision, inputs of linears in its own type."""
        narrow = precision.kept_input
        again = 0 if narrow == precision.weight else self.again
        return precision.weight * self.plain + round(narrow * (self.inputs + again))


def saved_bytes(model: Transformer, setup: Setup, share: Share) -> float:
    """Bytes per token that a stage keeps from a forward to its backward. A layer keeps everything that it needs except
    recomputed scores, or only its input. The first stage keeps the embedding's dropout mask, with a byte per number.
    The last stage keeps the inputs of its norm and its head, and the logits in float32 (section 4.3). With
    `head_slices` it keeps no logits, but the gradients of the head's input and, in float32, of the head's weight. What
    engines keep besides is in `engines.py`.
    """
    width, whole, engine = setup.precision.weight, whole_values(model, setup), engine_named(setup.engine)
    kept: float = sum(layers * layer_kept(kind, each) for layers, kind, each in share.kinds(model, setup))
    if share.first:
        kept += whole * model.dropout
    if share.last:
        inputs, logits = 0 if setup.frozen else _inputs(model, setup), model.head_outputs(setup.tensor)
        of_head: float = width * inputs + 4 * logits
        if setup.head_slices > 1:
            weight = 0 if setup.frozen else 4 * model.hidden * logits / tokens_of(model, setup)
            of_head = width * _inputs(model, setup) + weight
        kept += (1 + model.further_layers) * (width * whole + of_head)
    elif engine.keeps_outputs:
        kept += width * whole
    if not share.first and share.layers and engine.buffers_all:
        kept -= width * whole  # the first layer's input is in a buffer, which transfers have
    return kept


def deferred_bytes(model: Transformer, setup: Setup, share: Share) -> float:
    """Bytes per token that a stage keeps from I to W. These are the input of each linear and the gradient of its
    output, 32h per layer in half precision (arXiv 2401.10241, table 1). Recomputation does not change them, since W
    still needs what I recomputed. Tables keep the gradient of their output; with `head_slices`, the head keeps nothing.
    With sequence parallelism a rank keeps its part and gathers the others.

    The inputs of the query-key-value and wide linears, and the gradients of the two outputs, are whole on every tensor
    rank.
    """
    whole, kinds = whole_values(model, setup), share.kinds(model, setup)
    if setup.frozen:
        return setup.precision.weight * sum(layers * _adapted_values(kind, setup) for layers, kind, _ in kinds)
    values: float = 0
    for layers, kind, _ in kinds:
        kept = layer_values(kind, setup)
        values += layers * ((2 if kind.parts_alone else 4) * whole + kept.plain + kept.inputs)
    if share.first:
        values += whole
    if share.last:
        values += (1 + model.further_layers) * (whole + model.head_outputs(setup.tensor)) * (setup.head_slices == 1)
    return values * setup.precision.weight


def _adapted_values(model: Transformer, setup: Setup) -> float:
    """Numbers per token that the adapters of a layer keep from I to W: the inputs of the linears that have one, and the
    gradients of their outputs.
    """
    if not setup.lora_rank:
        return 0
    whole, kept = whole_values(model, setup), layer_values(model, setup)
    made = sum(linear.outputs for linear in model.attention_linears[:-1]) / setup.tensor
    outputs = {"linear_qkv": made, "linear_fc1": wide_values(model, setup), "linear_proj": whole, "linear_fc2": whole}
    inputs = normed_inputs(setup) * whole + kept.inputs + kept.again
    return inputs + sum(outputs[target] for target in setup.lora_targets)


def layer_kept(model: Transformer, setup: Setup) -> int:
    """Bytes per token that a layer keeps on its device from its forward to its backward."""
    if setup.offload_layers:
        return 0
    if setup.checkpoint == "full":
        return setup.precision.weight * whole_values(model, setup)
    if setup.checkpoint == "op":
        return op_values(model, setup).bytes(setup.precision)
    scores = _score_bytes(model, setup) if setup.checkpoint == "selective" else 0
    return _layer_bytes(model, setup) - scores - freed_bytes(model, setup)


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
    made = scan_made(model, setup.tensor) if model.mixer == "scan" else 0
    return tokens_of(model, setup) * setup.precision.weight * (model.hidden + max(made, wide_values(model, setup)))


def _layer_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes per token that a layer needs for its backward: h (10 + 24/t), with scores 5as/t more, in half precision.

    Whole on every tensor rank: what goes into the norms and the linears after them (4 values), and the masks of two
    dropouts (a byte each).
    """
    whole = whole_values(model, setup)
    parts = 1 if model.parts_alone else 2
    linears = min(normed_inputs(setup), parts)
    norms = KeptPerToken(parts * whole, linears * _inputs(model, setup)).bytes(setup.precision)
    values = layer_values(model, setup).bytes(setup.precision)
    values += setup.precision.weight * gathered_keys(model, setup)
    return norms + parts * model.dropout * whole + values + _score_bytes(model, setup) + _eager_bytes(model, setup)


def _eager_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes per token that a layer keeps more without kernels for norms and gates: an RMSNorm keeps its input in
    float32 and its output before the weight, and no other input; a gate keeps what its activation function made.
    """
    if not setup.eager:
        return 0
    norms = model.norms * whole_values(model, setup) * (model.norm == "rms")
    return 4 * norms + setup.precision.weight * model.gated * wide_values(model, setup) // 2


def _inputs(model: Transformer, setup: Setup) -> int:
    """Numbers per token of a linear's input that is kept after a norm: with sequence parallelism, the device's part."""
    return model.hidden if engine_named(setup.engine).gathers_inputs else whole_values(model, setup)


def _score_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes per token of attention's scores in memory: 5as/t in half precision, with dropout: the softmax, the
    dropout's result and its mask.
    """
    width = 2 * setup.precision.weight + 1 if model.dropout else setup.precision.weight
    is_stored = setup.stores_scores and model.mixer == "attention"
    return width * model.heads * sequence_of(model, setup) // setup.tensor if is_stored else 0


def layer_values(model: Transformer, setup: Setup) -> KeptPerToken:
    """A layer keeps (4 + 2r) h/t numbers. A backward needs query, key and value, the input of attention's output
    linear, the output of the wide linears, and the input of the output linear after them. Every rank has at least one
    head of key and value. A gated MLP counts as fused: its activation is recomputed. Latent attention makes a key and a
    value for every head, from latent vectors that are whole on every tensor rank.
    """
    heads, tensor = model.heads // setup.tensor, setup.tensor
    query, key = heads * (model.head_width + model.value_width), key_values(model, setup)
    parted = tensor if setup.sequence_parallel else 1
    normed = model.latent_normed // parted
    rest = _mlp_values(model, model.always_used, setup), _routed_values(model, setup)
    plain, inputs = sum(each.plain for each in rest), sum(each.inputs for each in rest)
    if model.mixer != "attention":
        if model.mixer == "scan":
            plain += scan_kept(model, tensor)
            inputs += model.scan_channels // tensor * _keeps_input(setup, "linear_proj")
        return KeptPerToken(plain, inputs)
    plain += query + key + model.latent_values // parted - normed
    inputs += normed * _keeps_input(setup, "linear_qkv")
    again = heads * model.value_width * _keeps_input(setup, "linear_proj")
    return KeptPerToken(plain + _between_adapters(model, setup), inputs, again=again)


def key_values(model: Transformer, setup: Setup) -> int:
    """Numbers per token of a layer's keys and values."""
    if model.kv_rank is not None:
        return model.heads // setup.tensor * (model.head_width + model.value_width)
    return 2 * max(model.key_width // setup.tensor, model.head_width)


def gathered_keys(model: Transformer, setup: Setup) -> int:
    """Numbers per token of this rank in keys and values of other context ranks, which a layer keeps if it gathers them
    before attention.
    """
    is_gathered = setup.context_kind == "gather" and model.mixer == "attention"
    return (setup.context - 1) * key_values(model, setup) if is_gathered else 0


def with_slice_buffers(cost: CostModel, model: Transformer, setup: Setup, shares: Sequence[Share]) -> CostModel:
    """The costs of stages that compute slices of microbatches, with the bytes of buffers for keys and values, and for
    their gradients. These have all tokens of a sequence, also where layers are computed again or offloaded. What a
    forward saves has no keys then.
    """

    def values(share: Share, number: Callable[[Transformer, Setup], float]) -> float:
        return sum(layers * number(kind, its) for layers, kind, its in share.kinds(model, setup))

    width = tokens_of(model, setup) * setup.precision.weight
    keys = tuple(width * values(share, _all_keys) for share in shares)
    saved = (width * values(share, _kept_keys) for share in shares)
    return replace(
        cost,
        saved_bytes=tuple(map(sub, cost.saved_bytes, saved)),
        kept_bytes={**cost.kept_bytes, Content.KEYS: keys, Content.KEYS_GRADIENT: keys},
    )


def _all_keys(model: Transformer, setup: Setup) -> int:
    """The keys and values of a layer per token of this rank, with those that it gathers."""
    return key_values(model, setup) + gathered_keys(model, setup)


def _kept_keys(model: Transformer, setup: Setup) -> int:
    """Those of them that a layer keeps for its backward."""
    if setup.offload_layers or setup.checkpoint == "full" or "mla_up_proj" in recomputed_modules(model, setup):
        return 0
    return key_values(model, setup) // 2 if setup.checkpoint == "op" else _all_keys(model, setup)


def _keeps_input(setup: Setup, target: str) -> bool:
    """Whether the linears of this name of LORA_TARGETS keep their inputs: if their weights or adapters learn."""
    return not setup.frozen or (setup.lora_rank > 0 and target in setup.lora_targets)


def normed_inputs(setup: Setup) -> int:
    """How many of the two linears behind the norms of a layer keep their inputs."""
    return _keeps_input(setup, "linear_qkv") + _keeps_input(setup, "linear_fc1")


def _between_adapters(model: Transformer, setup: Setup) -> int:
    """Numbers that the adapters of a layer keep between their two linears."""
    uses = model.active_experts if model.experts > 1 else 1
    wide = {"linear_fc1", "linear_fc2"}
    return setup.lora_rank * sum(uses if target in wide else 1 for target in setup.lora_targets)


def _mlp_values(model: Transformer, count: int, setup: Setup) -> KeptPerToken:
    """The numbers that `count` MLPs keep if each gets all tokens."""
    wide, tensor = count * model.wide, setup.tensor
    return KeptPerToken(wide * (2 if model.gated else 1) // tensor, wide // tensor * _keeps_input(setup, "linear_fc2"))


def wide_values(model: Transformer, setup: Setup) -> int:
    """Numbers per token in the outputs of wide linears, of all MLPs that a token uses."""
    routed = model.experts_per_token if model.experts > 1 else 0
    return (model.always_used + routed) * (2 if model.gated else 1) * model.wide // setup.tensor


def _routed_values(model: Transformer, setup: Setup) -> KeptPerToken:
    """What experts keep: the inputs that the router sends to each, and one number per expert. Their outputs are kept
    where the router's weights multiply them. On expert ranks, these multiply the activations, as in Megatron-LM, so
    outputs are not needed. The ranks of an expert have all tokens that are sent to it, and divide its width; ranks that
    have whole experts get as many tokens as they send, which with sequence parallelism are a part.
    """
    if model.experts == 1:
        return KeptPerToken(0)
    split, uses = setup.expert_split, model.experts_per_token * setup.expert_split
    output = model.hidden if setup.expert == 1 else 0
    plain = uses * (output + (2 if model.gated else 1) * model.wide // split) // setup.tensor + model.experts
    first, second = _keeps_input(setup, "linear_fc1"), _keeps_input(setup, "linear_fc2")
    return KeptPerToken(plain, uses * (first * model.hidden + second * model.wide // split) // setup.tensor)


def recomputed_modules(model: Transformer, setup: Setup) -> tuple[str, ...]:
    """Those of the setup's modules that a layer of the model has; what contains another one counts alone."""
    has = {"moe": model.experts > 1, "moe_act": model.experts > 1, "mlp": model.experts == 1}
    has |= {"shared_experts": model.shared_experts > 0, "mla_up_proj": model.kv_rank is not None}
    if has["moe"] and "moe" in setup.recompute_modules:
        has |= {"moe_act": False, "shared_experts": False}
    return tuple(module for module in setup.recompute_modules if has.get(module, True))


def freed_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes per token that a layer does not keep, since its backward computes modules again."""
    if not (modules := recomputed_modules(model, setup)):
        return 0
    shared, routed = _mlp_values(model, model.shared_experts, setup), _routed_values(model, setup)
    norms = min(normed_inputs(setup), model.norms)
    active = _keeps_input(setup, "linear_fc2") * model.experts_per_token * model.wide // setup.tensor
    freed = {
        # a fused kernel keeps what the linears beside it need; scores are `checkpoint`'s
        "core_attn": KeptPerToken(0),
        "layernorm": KeptPerToken(0, norms * whole_values(model, setup)),
        "mla_up_proj": KeptPerToken(
            model.heads // setup.tensor * (2 * model.head_width + model.value_width) + gathered_keys(model, setup)
        ),
        "mlp": _mlp_values(model, 1, setup),
        "moe": KeptPerToken(routed.plain + shared.plain, routed.inputs + shared.inputs),
        "moe_act": KeptPerToken(0, active),
        "shared_experts": shared,
    }
    return sum(freed[module].bytes(setup.precision) for module in modules)


def op_values(model: Transformer, setup: Setup) -> KeptPerToken:
    """What a layer with checkpoint "op" keeps: its input, attention's output, and every other product in the order of
    torchtitan's linears, which are query, key, value, output, gate, up and down. Kept are query, value and the gate, or
    the first wide linear of an MLP without one. With sequence parallelism the sum of attention's parts is kept, too,
    since a reduce-scatter is not repeated. No backward needs the last product of a gated MLP, and compiled programs do
    not keep it. Others do, with its sum, since torch stores all that a policy names (`_CachingTorchDispatchMode`).

    Source: `_save_list` of pytorch/torchtitan/torchtitan/parallelisms/parallelize_llama.py at 9dec370ad26b. Raises
    UsageError for layers with other linears.
    """
    if model.experts > 1 or model.kv_rank is not None:
        raise UsageError(
            "checkpoint 'op' is for layers with one MLP and without latent attention: use 'full', or recompute_modules"
        )
    whole, keeps_sum = whole_values(model, setup), setup.sequence_parallel and setup.tensor > 1
    last = model.hidden + keeps_sum * whole if setup.eager and model.gated else 0
    heads = model.heads // setup.tensor * (model.head_width + model.value_width)
    value = max(model.key_width // setup.tensor, model.head_width)
    return KeptPerToken(whole * (1 + keeps_sum) + heads + value + model.wide // setup.tensor + last)


def op_linears(model: Transformer, setup: Setup) -> tuple[Linear, ...]:
    """The linears that a backward with checkpoint "op" computes again: key, the output of attention unless its sum is
    kept, and up.
    """
    hidden, output = model.hidden, model.attention_linears[-1]
    keeps_sum = setup.sequence_parallel and setup.tensor > 1
    found = Linear(hidden, model.key_width, "outputs"), *([] if keeps_sum else [output])
    return (*found, Linear(hidden, model.wide, "outputs")) if model.gated else found
