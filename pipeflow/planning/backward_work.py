"""Recomputed work: what a backward computes again of a layer's modules. Must not contain: the bytes that this frees."""

from __future__ import annotations

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.linears import attention_linears
from pipeflow.planning.recomputation import op_linears, recomputed_modules
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer_costs import tokens_of
from pipeflow.planning.work import DeviceWork, MatrixProduct, layer_work, linear_product, perceptrons, routed_values

NORM_VALUES = 2  # read and written by a norm
ROPE_VALUES = 2  # read and written where positions are applied


def recomputed_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forwards of the setup's `recompute_modules` of one layer, or of what its checkpoint "op" makes again."""
    if setup.checkpoint == "op":
        return _op_work(model, setup)
    whole, modules = layer_work(model, setup), recomputed_modules(model, setup)
    products: list[MatrixProduct] = []
    values = 0.0
    for module in modules:
        products += _products(model, setup, module)
        values += _values(model, setup, module)
    moved = values * tokens_of(model, setup) * setup.precision.weight
    attended = whole.attention_flops if "core_attn" in modules else 0.0
    return DeviceWork(tuple(products), attention_flops=attended, moved_bytes=moved, scores=whole.scores)


def _op_work(model: Transformer, setup: Setup) -> DeviceWork:
    """Norms, positions, activation functions and every other product."""
    tokens = tokens_of(model, setup)
    rotated = ROPE_VALUES * (model.query_width + model.key_width) / setup.tensor
    values = _values(model, setup, "layernorm") + rotated + _values(model, setup, "mlp")
    products = tuple(linear_product(linear, tokens, setup) for linear in op_linears(model, setup))
    return DeviceWork(products, moved_bytes=values * tokens * setup.precision.weight)


def _products(model: Transformer, setup: Setup, module: str) -> list[MatrixProduct]:
    tokens = tokens_of(model, setup)
    if module == "mla_up_proj":
        made = [linear for linear in attention_linears(model) if linear.inputs in (model.q_rank, model.kv_rank)]
        return [linear_product(linear, tokens, setup) for linear in made if linear.split == "outputs"]
    each = list(perceptrons(model, tokens, setup))
    if module in ("mlp", "moe"):
        return each
    return each[-2:] if module == "shared_experts" else []


def _values(model: Transformer, setup: Setup, module: str) -> float:
    """Numbers per token that are read and written."""
    tensor = setup.tensor
    whole = model.hidden / tensor if setup.sequence_parallel else model.hidden
    wide = (3 if model.gated else 2) * model.wide / tensor
    return {
        "core_attn": 0.0,
        "layernorm": (1 if model.parallel_block else 2) * NORM_VALUES * whole,
        "mla_up_proj": ROPE_VALUES * model.heads / tensor * (2 * model.head_width + model.value_width),
        "mlp": wide,
        "shared_experts": model.shared_experts * wide,
        "moe_act": model.experts_per_token * wide,
        "moe": model.active_experts * wide + routed_values(model, setup),
    }[module]
