"""Initial weights of a vision transformer: those of torch's own layers, or those of the paper's JAX code
(github.com/google-research/vision_transformer). Each is a table of how parameters are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatch

import torch
from torch import Generator, Tensor, nn

import pipeflow
from pipeflow.tensor import ColumnParallelLinear, RowParallelLinear, initialize_

Draw = Callable[[Tensor, Generator, int, int], object]
"""Fills a block of a parameter from a generator, given the numbers of inputs and outputs of the whole layer."""

CUT_DEVIATION = 0.87962566103423978  # of a standard normal distribution truncated at 2 standard deviations


def initialize(module: nn.Module, method: str, *, seed: int | None = None) -> None:
    """Draws all parameters of `module` that are in memory. Values do not depend on how tensor ranks split them.

    Args:
        module: the module.
        method: "torch" or "jax".
        seed: each parameter is drawn from it and from its name in `module`. None uses the next number of torch's
            default generator, which must be in the same state on all tensor ranks.

    Raises UsageError for another method.
    """
    if method not in RULES:
        raise pipeflow.UsageError(f"init_method must be one of {', '.join(map(repr, RULES))}, got {method!r}")
    layers = dict(module.named_modules())

    def fill(name: str, block: Tensor, generator: Generator) -> None:
        draw = next(draw for pattern, draw in RULES[method] if fnmatch(name, pattern))
        draw(block, generator, *fans(layers[name.rpartition(".")[0]]))

    if seed is None:
        seed = int(torch.randint(2**53, (), device="cpu"))
    initialize_(module, fill, seed=seed)


def fans(layer: nn.Module) -> tuple[int, int]:
    """The number of inputs per output of the whole layer, and the number of outputs; zeros for other modules."""
    if isinstance(layer, nn.Conv2d):
        return layer.weight[0].numel(), layer.out_channels
    if isinstance(layer, nn.Linear | ColumnParallelLinear | RowParallelLinear | pipeflow.tensor.Classifier):
        return layer.in_features, layer.out_features
    return 0, 0


def ones(block: Tensor, generator: Generator, inputs: int, outputs: int) -> None:
    block.fill_(1)


def zeros(block: Tensor, generator: Generator, inputs: int, outputs: int) -> None:
    block.zero_()


def normal(deviation: float) -> Draw:
    """Draws from a normal distribution with mean 0."""
    return lambda block, generator, inputs, outputs: block.normal_(0, deviation, generator=generator)


def by_inputs(block: Tensor, generator: Generator, inputs: int, outputs: int) -> None:
    """As in nn.Linear and nn.Conv2d: uniform up to 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(inputs)
    block.uniform_(-bound, bound, generator=generator)


def xavier(block: Tensor, generator: Generator, inputs: int, outputs: int) -> None:
    """Glorot and Bengio's uniform distribution, of variance 2 / (inputs + outputs)."""
    bound = math.sqrt(6 / (inputs + outputs))
    block.uniform_(-bound, bound, generator=generator)


def xavier_of_three(block: Tensor, generator: Generator, inputs: int, outputs: int) -> None:
    """`xavier` for three packed layers: query, key and value."""
    xavier(block, generator, inputs, outputs // 3)


def lecun(block: Tensor, generator: Generator, inputs: int, outputs: int) -> None:
    """Normal, truncated at 2 standard deviations, with variance 1 / inputs after truncation."""
    deviation = 1 / math.sqrt(inputs) / CUT_DEVIATION
    nn.init.trunc_normal_(block, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator)


_ALWAYS: list[tuple[str, Draw]] = [
    ("*norm*.weight", ones),
    ("*norm*.bias", zeros),
    ("*class_token", zeros),
    ("*positions", normal(0.02)),
]

RULES: dict[str, list[tuple[str, Draw]]] = {  # the first pattern that matches a parameter's name is used
    "torch": [*_ALWAYS, ("*", by_inputs)],
    "jax": [
        *_ALWAYS,
        ("*projection.weight", lecun),
        ("*representation.weight", lecun),
        ("*classifier.weight", zeros),
        ("*query_key_value.weight", xavier_of_three),
        ("*.weight", xavier),
        ("*wide.bias", normal(1e-6)),
        ("*narrow.bias", normal(1e-6)),
        ("*.bias", zeros),
    ],
}
