"""Recomputation: the modules of a layer that a backward may compute again, and the bytes that this frees. Must not
contain: how long it takes.

The names are those of Megatron-LM's `--recompute-modules`: attention between its linears (core_attn), norms
(layernorm), the linears that make query, key and value of latent vectors (mla_up_proj), MLPs of layers without experts
(mlp), experts with their router and the way of tokens there and back (moe), their activation functions alone (moe_act),
and shared experts. A checkpoint "op" chooses single products instead.
"""

from __future__ import annotations

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.kept import KeptPerToken, keeps_input, mlp_values, normed_inputs, routed_kept
from pipeflow.planning.linears import Linear, attention_linears
from pipeflow.planning.setup import Setup


def freed_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes per token that a layer does not keep, since its backward makes them again."""
    modules = recomputed_modules(model, setup)
    return sum(_freed(model, setup, module).bytes(setup.precision) for module in modules)


def recomputed_modules(model: Transformer, setup: Setup) -> tuple[str, ...]:
    """Those of the setup's modules that a layer of the model has; what contains another one counts alone."""
    has = {"moe": model.experts > 1, "moe_act": model.experts > 1, "mlp": model.experts == 1}
    has |= {"shared_experts": model.shared_experts > 0, "mla_up_proj": model.kv_rank is not None}
    if has["moe"] and "moe" in setup.recompute_modules:
        has |= {"moe_act": False, "shared_experts": False}
    return tuple(module for module in setup.recompute_modules if has.get(module, True))


def recomputed_flops(model: Transformer, setup: Setup, sequence: int) -> int:
    """Operations per token, on all tensor ranks, of the modules that the backward of a layer makes again, or of the
    products that a checkpoint "op" does.
    """
    if setup.checkpoint == "op":
        return 2 * sum(linear.weights for linear in op_linears(model, setup))
    attention = attention_linears(model)
    mlps = model.linear_flops - 2 * sum(linear.weights for linear in attention)
    matrices = 3 if model.gated else 2
    flops = {
        "core_attn": model.attention_flops(sequence),
        "mla_up_proj": 2 * sum(each.weights for each in attention if each.inputs in (model.q_rank, model.kv_rank)),
        "mlp": mlps,
        "moe": mlps,
        "shared_experts": 2 * model.shared_experts * matrices * model.hidden * model.wide,
    }
    return sum(flops.get(module, 0) for module in recomputed_modules(model, setup))


def op_linears(model: Transformer, setup: Setup) -> tuple[Linear, ...]:
    """The linears that a backward with checkpoint "op" computes again: key, the output of attention unless its sum is
    kept, and up.
    """
    hidden, output = model.hidden, attention_linears(model)[-1]
    keeps_sum = setup.sequence_parallel and setup.tensor > 1
    found = Linear(hidden, model.key_width, "outputs"), *([] if keeps_sum else [output])
    return (*found, Linear(hidden, model.wide, "outputs")) if model.gated else found


def _freed(model: Transformer, setup: Setup, module: str) -> KeptPerToken:
    whole = model.hidden // setup.tensor if setup.sequence_parallel else model.hidden
    shared = mlp_values(model, model.shared_experts, setup)
    second = keeps_input(setup, "linear_fc2")
    routed = routed_kept(model, setup)
    return {
        # a fused kernel keeps what the linears beside it need; scores are `checkpoint`'s
        "core_attn": KeptPerToken(0, 0),
        "layernorm": KeptPerToken(0, min(normed_inputs(setup), 1 if model.parallel_block else 2) * whole),
        "mla_up_proj": KeptPerToken(model.heads // setup.tensor * (2 * model.head_width + model.value_width), 0),
        "mlp": mlp_values(model, 1, setup),
        "moe": KeptPerToken(routed.plain + shared.plain, routed.inputs + shared.inputs),
        "moe_act": KeptPerToken(0, second * model.experts_per_token * model.wide // setup.tensor),
        "shared_experts": shared,
    }[module]
