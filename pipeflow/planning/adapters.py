"""Adapters: the products and the parameters of low-rank matrices beside frozen linears (LoRA, arXiv 2106.09685). Must
not contain: what a layer has without them.

An adapter of rank r of a linear from n to m numbers is a linear from n to r and one from r to m, whose output is added
to that of the frozen linear. Tensor ranks split the two as they split the linear.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.linears import attention_linears
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer_costs import Parameters, Share, tokens_of
from pipeflow.planning.work import DeviceWork, MatrixProduct, linear_product, perceptrons

ADDED_VALUES = 3  # per number of an adapter's output: read beside the linear's own, and their sum is written


def adapter_work(model: Transformer, setup: Setup) -> DeviceWork:
    """The forward of the adapters of one layer on one of its tensor ranks; nothing without a `lora_rank`."""
    products = [product for product, _ in _products(model, setup)]
    added = ADDED_VALUES * sum(each.rows * each.columns * each.repeats for each in products[1::2])
    weights = sum(map(_weights, products))
    precision = setup.precision.learned or setup.precision
    summed = weights * (precision.weight + 2 * precision.gradient)
    return DeviceWork(tuple(products), moved_bytes=setup.precision.weight * added, added_bytes=summed)


def learned_parameters(model: Transformer, share: Share, setup: Setup) -> Parameters:
    """The parameters of a share's adapters on one device."""
    others = experts = 0.0
    for layers, kind, each in share.kinds(model, setup):
        for product, is_expert in _products(kind, each):
            experts += layers * is_expert * _weights(product)
            others += layers * (not is_expert) * _weights(product)
    return Parameters(round(others), round(experts))


def _weights(product: MatrixProduct) -> float:
    return product.columns * product.depth * product.repeats


def _products(model: Transformer, setup: Setup) -> Iterator[tuple[MatrixProduct, bool]]:
    """The two products of each adapter of a layer, and whether it is one of an expert that tokens are sent to."""
    if not setup.lora_rank:
        return
    tokens, rank = tokens_of(model, setup), setup.lora_rank
    *attention, out = (linear_product(linear, tokens, setup) for linear in attention_linears(model))
    mlps = list(perceptrons(model, tokens, setup))[1 if model.experts > 1 else 0 :]
    linears = {"linear_qkv": attention, "linear_proj": [out], "linear_fc1": mlps[::2], "linear_fc2": mlps[1::2]}
    for target in setup.lora_targets:
        for place, each in enumerate(linears[target]):
            is_expert = model.experts > 1 and place == 0 and target in ("linear_fc1", "linear_fc2")
            yield MatrixProduct(each.rows, rank, each.depth, each.repeats), is_expert
            yield MatrixProduct(each.rows, each.columns, rank, each.repeats), is_expert
