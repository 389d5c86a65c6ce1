"""DeviceWork: what one device computes in a layer, an embedding or a head, for one microbatch: in its forward, in
adapters beside it, and again in its backward. Must not contain: rates of devices, or times.

An adapter of rank r of a linear from n to m numbers is a linear from n to r and one from r to m, whose output is added
to that of the frozen linear (LoRA, arXiv 2106.09685). Tensor ranks split the two as they split the linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeflow.planning.attention import FUSED_BACKWARD, Scores
from pipeflow.planning.blocks import Linear, Transformer
from pipeflow.planning.engines import engine_named
from pipeflow.planning.kept import op_linears, recomputed_modules
from pipeflow.planning.scans import scan_flops, scan_moved, scan_products
from pipeflow.planning.setup import FEW_BITS, Setup, is_plain
from pipeflow.planning.shares import Parameters, Share, sequence_of, tokens_of, whole_values
from pipeflow.planning.transformer import GPT

SCORE_BYTES = 13  # per attention score in half precision: written, masked and normalised, dropped out, read again
WHOLE_VALUES = 11  # per token and `hidden`: two norms, two sums with a residual and their dropouts
ATTENTION_AGAIN = FUSED_BACKWARD - 2  # of the products of fused attention, that its backward computes again
PARALLEL_VALUES = 4  # fewer in a parallel block: it has one norm and one sum with the residual less
ROUTED_VALUES = 4  # per expert of a token and `hidden`: read and written on the way to it, read and added behind it
ADDED_VALUES = 3  # per number of an adapter's output: read beside the linear's own, and their sum is written
NORM_VALUES = 2  # read and written by a norm
ROPE_VALUES = 2  # read and written where positions are applied
EAGER_NORM = 16  # more by RMSNorm in single operations: to float32, square, mean, product, to 16 bits, times a weight
EAGER_ROPE = 8  # more by positions in single operations: two products, half negated, both halves swapped, a sum
EAGER_GATE = 2  # more by a gate in two operations: the activation is written and read
CAST_BYTES = 4  # per number that a product in 8 bits reads: 16 bits read, 8 written as they are and 8 transposed
LOSS_BYTES = 32.0  # per logit: copied to float32, its maximum, difference, exponential, sum and share, one by one
TORCH_LOSS_BYTES = 14.0  # per logit of torch's cross_entropy: copied to float32, one log_softmax, and the same back
COPIES = 4  # per divided gradient: copied into the buffer that is reduced, and divided there by the number of ranks
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

    @property
    def weights(self) -> float:
        """Numbers in their second operands."""
        return self.columns * self.depth * self.repeats


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
        added_bytes: bytes read and written where the gradients of weights are added to those of earlier microbatches.
        inner: matrix products of activations alone, as in a scan by chunks; the backward has two for each, and computes
            it again.
        scalar_flops: operations in float32 outside of the units for products; the backward as with `inner`.
    """

    products: tuple[MatrixProduct, ...]
    attention_flops: float = 0.0
    again_flops: float = 0.0
    moved_bytes: float = 0.0
    score_bytes: float = 0.0
    scores: Scores | None = None
    added_bytes: float = 0.0
    inner: tuple[MatrixProduct, ...] = ()
    scalar_flops: float = 0.0


def layer_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of one transformer layer, for one microbatch, on one of its tensor ranks."""
    sequence, tensor = sequence_of(model, setup), setup.tensor
    tokens, hidden, width = tokens_of(model, setup), model.hidden, setup.precision.weight
    linears, is_causal, attends = model.attention_linears, isinstance(model, GPT), model.mixer == "attention"
    is_stored = setup.stores_scores and attends
    is_skipped = is_causal and not is_stored  # fused attention skips what the causal mask leaves out
    near = min(sequence, setup.document or sequence) if is_skipped else sequence
    attention = tokens * model.attention_flops(near) / tensor if attends else 0.0
    if is_skipped:
        attention *= model.seen(near) / 2
    values = sum({"outputs": each.outputs, "inputs": each.inputs, "none": 0}[each.split] for each in linears) / tensor
    values += (3 if model.gated else 2) * model.active_experts * model.wide / tensor
    values += scan_moved(model, tensor) if model.mixer == "scan" else 0.0
    parted = tensor if setup.sequence_parallel else 1
    passes = WHOLE_VALUES / 2 if model.parts_alone else WHOLE_VALUES - PARALLEL_VALUES * model.parallel_block
    whole = passes * hidden / parted + model.latent_values / parted
    products = (*(_linear_product(linear, tokens, setup) for linear in linears), *_perceptrons(model, tokens, setup))
    cast = CAST_BYTES if setup.precision.products in FEW_BITS else 0
    values += _eager_values(model, setup)
    moved = width * tokens * (whole + values + _routed_values(model, setup)) + _merged_bytes(model, setup)
    return DeviceWork(
        products,
        attention_flops=attention,
        again_flops=0.0 if is_stored else attention * ATTENTION_AGAIN,
        moved_bytes=moved + cast * sum(each.rows * each.depth * each.repeats for each in products),
        score_bytes=tokens * sequence * model.heads / tensor * SCORE_BYTES * width / 2 if is_stored else 0.0,
        scores=Scores(setup.kernel, _keys_at_once(model, setup), (model.head_width + model.value_width) / 2, is_causal),
        added_bytes=added_bytes(products, setup),
        inner=_scan_products(model, tokens, tensor),
        scalar_flops=tokens * scan_flops(model) / tensor if model.mixer == "scan" and not model.scan_heads else 0.0,
    )


def _scan_products(model: Transformer, tokens: float, tensor: int) -> tuple[MatrixProduct, ...]:
    """The products of a scan by chunks: each chunk of a head or a group is one."""
    if model.mixer != "scan":
        return ()
    chunks = tokens / min(model.scan_chunk, tokens)
    shapes = scan_products(model)
    return tuple(
        MatrixProduct(tokens / chunks, columns, depth, chunks * max(1, many / tensor))
        for columns, depth, many in shapes
    )


def _eager_values(model: Transformer, setup: Setup) -> float:
    """Numbers per token that a layer reads and writes more where it has no kernels for norms, positions and gates."""
    if not setup.eager:
        return 0.0
    norms = model.norms * whole_values(model, setup) * (model.norm == "rms")
    rotary = isinstance(model, GPT) and not model.position_table and model.mixer == "attention"
    rotated = model.query_width + model.key_width if model.kv_rank is None else (model.heads + 1) * model.rope_size
    gates = model.gated * model.active_experts * model.wide
    return EAGER_NORM * norms + (EAGER_ROPE * rotary * rotated + EAGER_GATE * gates) / setup.tensor


def added_bytes(products: Iterable[MatrixProduct], setup: Setup) -> float:
    """Bytes in which the gradients of the products' weights are added up: a new one and the sum are read, the sum is
    written. What `zero` divides of gradients, each rank adds up alone, after all of them went through a buffer (FSDP's
    `_reduce_grad`, DeepSpeed's `reduce_independent_p_g_buckets_and_remove_grads`). An engine with both gradients sets
    those of 16 bits to zero, adds to them, copies them to float32, and adds the copy to the sums (BF16_Optimizer).
    """
    weights = sum(each.weights for each in products)
    precision = setup.precision
    summed = weights * (precision.weight + 2 * precision.gradient)
    if engine_named(setup.engine).both_gradients and precision.gradient > precision.weight:
        summed = weights * (5 * precision.weight + 4 * precision.gradient)
    if setup.zero < 2 or setup.reduce_once:
        return summed
    return summed / setup.shards + COPIES * weights * precision.gradient


def _keys_at_once(model: Transformer, setup: Setup) -> float:
    """The keys that a query meets in one call of attention: in a ring, those of one rank."""
    keys = sequence_of(model, setup)
    if setup.context_kind == "ring":
        keys //= setup.context
    window = keys if model.window is None or model.full_every else model.window
    return min(keys, window, setup.document or keys)


def _linear_product(linear: Linear, tokens: float, setup: Setup) -> MatrixProduct:
    """The product of a linear on one tensor rank. One that is whole gets the rank's own tokens."""
    if linear.split == "none":
        return MatrixProduct(tokens / (setup.tensor if setup.sequence_parallel else 1), linear.outputs, linear.inputs)
    inputs, outputs = linear.inputs, linear.outputs
    if linear.split == "inputs":
        return MatrixProduct(tokens, outputs, inputs / setup.tensor)
    return MatrixProduct(tokens, outputs / setup.tensor, inputs)


def _merged_bytes(model: Transformer, setup: Setup) -> float:
    """Bytes in which a ring of context ranks adds up the outputs of attention: each step reads one, and reads and
    writes the sum.
    """
    if setup.context == 1 or setup.context_kind != "ring" or model.mixer != "attention":
        return 0.0
    output = tokens_of(model, setup) * model.heads * model.value_width / setup.tensor
    return (setup.context - 1) * output * (setup.precision.weight + 2 * 4)


def _routed_values(model: Transformer, setup: Setup) -> float:
    """Numbers per token that are read and written where tokens are sorted by their experts, and added up again."""
    if model.experts == 1:
        return 0.0
    return ROUTED_VALUES * model.experts_per_token * model.hidden * setup.expert_split / setup.tensor


def _perceptrons(model: Transformer, tokens: float, setup: Setup) -> Iterator[MatrixProduct]:
    """The products of MLPs: router, experts, and last those of MLPs that every token uses. The devices of an expert
    rank have all tokens that are sent to its experts: as many in all as their own tokens have uses of experts.
    """
    wide, matrices, hidden, split = model.wide, 2 if model.gated else 1, model.hidden, setup.expert_split
    if model.experts > 1:
        yield MatrixProduct(tokens, model.experts, hidden)  # the router
        own = model.experts / setup.expert
        rows = setup.imbalance * tokens * model.experts_per_token * split / setup.tensor / own
        yield MatrixProduct(rows, matrices * wide / split, hidden, own)
        yield MatrixProduct(rows, hidden, wide / split, own)
    if always := model.always_used:
        yield MatrixProduct(tokens, matrices * always * wide / setup.tensor, hidden)
        yield MatrixProduct(tokens, hidden, always * wide / setup.tensor)


def embedding_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of the part before the layers."""
    tokens = tokens_of(model, setup)
    reading = MatrixProduct(tokens, model.hidden, model.embedding_flops / (2 * model.hidden))
    moved = EMBEDDING_PASSES * setup.precision.weight * tokens * model.hidden
    return DeviceWork((reading,) if reading.flops else (), moved_bytes=moved)


def head_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of the head and the loss, whose backward moves as much as its forward. Layers that predict further
    tokens have these again, and a linear from a hidden state and a token.
    """
    tokens, outputs = tokens_of(model, setup), model.head_outputs(setup.tensor)
    further = model.further_layers
    products = [MatrixProduct(tokens, outputs, model.hidden, 1 + further)]
    if further:
        products.append(MatrixProduct(tokens, model.hidden / setup.tensor, 2 * model.hidden, further))
    moved = (1 + further) * (TORCH_LOSS_BYTES if is_plain(setup) else LOSS_BYTES) * tokens * outputs
    return DeviceWork(tuple(products), moved_bytes=moved, added_bytes=added_bytes(products, setup))


def adapter_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of the adapters of one layer on one of its tensor ranks; nothing without a `lora_rank`."""
    products = [product for product, _ in _adapters(model, setup)]
    added = ADDED_VALUES * sum(each.rows * each.columns * each.repeats for each in products[1::2])
    precision = setup.precision.learned or setup.precision
    summed = sum(each.weights for each in products) * (precision.weight + 2 * precision.gradient)
    return DeviceWork(tuple(products), moved_bytes=setup.precision.weight * added, added_bytes=summed)


def learned_parameters(model: Transformer, shares: Iterable[Share], setup: Setup) -> Parameters:
    """The parameters of the adapters of a device with these shares."""
    others = experts = 0
    if not setup.lora_rank:
        return Parameters(0, 0)
    for share in shares:
        found = [
            (layers * product.weights, is_expert)
            for layers, kind, each in share.kinds(model, setup)
            for product, is_expert in _adapters(kind, each)
        ]
        experts += round(sum(count for count, is_expert in found if is_expert))
        others += round(sum(count for count, is_expert in found if not is_expert))
    return Parameters(others, experts)


def _adapters(model: Transformer, setup: Setup) -> Iterator[tuple[MatrixProduct, bool]]:
    """The two products of each adapter of a layer, and whether it is one of an expert that tokens are sent to."""
    if not setup.lora_rank:
        return
    tokens, rank = tokens_of(model, setup), setup.lora_rank
    *attention, out = (_linear_product(linear, tokens, setup) for linear in model.attention_linears)
    mlps = list(_perceptrons(model, tokens, setup))[1 if model.experts > 1 else 0 :]
    linears = {"linear_qkv": attention, "linear_proj": [out], "linear_fc1": mlps[::2], "linear_fc2": mlps[1::2]}
    for target in setup.lora_targets:
        for place, each in enumerate(linears[target]):
            is_expert = model.experts > 1 and place == 0 and target in ("linear_fc1", "linear_fc2")
            yield MatrixProduct(each.rows, rank, each.depth, each.repeats), is_expert
            yield MatrixProduct(each.rows, each.columns, rank, each.repeats), is_expert


def recomputed_work(model: Transformer, setup: Setup) -> DeviceWork:
    """What a backward computes again: the forwards of the setup's `recompute_modules` of one layer, or norms,
    positions, activation functions and every other product for a checkpoint "op".
    """
    tokens, tensor = tokens_of(model, setup), setup.tensor
    mlps = list(_perceptrons(model, tokens, setup))
    norms = model.norms * NORM_VALUES * whole_values(model, setup)
    wide = (3 if model.gated else 2) * model.wide / tensor
    if setup.checkpoint == "op":
        rotated = ROPE_VALUES * (model.query_width + model.key_width) / tensor
        products = tuple(_linear_product(linear, tokens, setup) for linear in op_linears(model, setup))
        values = norms + rotated + wide + _eager_values(model, setup)
        return DeviceWork(products, moved_bytes=values * tokens * setup.precision.weight)
    latent = [_linear_product(linear, tokens, setup) for linear in model.from_latent]
    rotated = ROPE_VALUES * model.heads / tensor * (2 * model.head_width + model.value_width)
    routed = model.active_experts * wide + _routed_values(model, setup)
    work: dict[str, tuple[list[MatrixProduct], float]] = {  # products, and numbers per token read and written
        "core_attn": ([], 0.0),
        "layernorm": ([], norms),
        "mla_up_proj": (latent, rotated),
        "mlp": (mlps, wide),
        "shared_experts": (mlps[-2:], model.shared_experts * wide),
        "moe_act": ([], model.experts_per_token * wide),
        "moe": (mlps, routed),
    }
    whole, again = layer_work(model, setup), recomputed_modules(model, setup)
    return DeviceWork(
        tuple(product for module in again for product in work[module][0]),
        attention_flops=whole.attention_flops if "core_attn" in again else 0.0,
        moved_bytes=sum(work[module][1] for module in again) * tokens * setup.precision.weight,
        scores=whole.scores,
    )
