"""What each sample adds to the gradients of linear layers and embeddings, and how large the terms of these sums are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.checking.parts import Part
from pipeflow.checking.sketches import exact, signs
from pipeflow.engine.parallel.sharding import own_values

Note = Callable[..., None]


def watch_gradient(note: Note, own: dict[str, Part], inputs: Tensor, output: Tensor, microbatch: int) -> None:
    """Notes, when the gradient of a layer's output comes, how much each sample adds to the gradients of its weight and
    bias, and how large the terms are that these gradients sum up, which bounds their rounding.
    """
    weight = own.get("weight")
    factor = None
    with torch.no_grad():
        if weight is not None and len(weight.shape) == 2:
            factor = _factor(own_values(inputs), weight.shape, output)

    def arrived(gradient: Tensor) -> None:
        with torch.no_grad():
            _note_samples(note, own, factor, exact(own_values(gradient)), microbatch)

    output.register_hook(arrived)


class _Factor(NamedTuple):
    """What multiplies the gradient of an output in that of the weight, for each sample and token.

    Attributes:
        sketch: [rows, tokens, PROBES], over one dimension of the weight.
        sizes: its squared norm, [rows, tokens].
        dim: the weight's other dimension, that of the output.
    """

    sketch: Tensor
    sizes: Tensor
    dim: int


def _factor(inputs: Tensor, shape: Sequence[int], output: Tensor) -> _Factor | None:
    """The factor of an embedding or a linear layer whose weight has this shape; None for other layers."""
    if not inputs.is_floating_point() and output.shape[:-1] == inputs.shape and output.shape[-1] == shape[1]:
        rows = inputs.reshape(len(inputs), -1)
        table = signs(0, 0, shape[0], torch.float32, inputs.device)
        return _Factor(table[rows], torch.ones_like(rows, dtype=torch.float32), 1)
    if inputs.is_floating_point() and inputs.dim() > 1 and (inputs.shape[-1], output.shape[-1]) == (shape[1], shape[0]):
        values = exact(inputs).reshape(len(inputs), -1, shape[1])
        sketch = values @ signs(1, 0, shape[1], values.dtype, values.device)
        return _Factor(sketch, _squares(values), 0)
    return None


def _squares(rows: Tensor) -> Tensor:
    """The squared norms along the last dimension."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.square()


def _note_samples(note: Note, own: dict[str, Part], factor: _Factor | None, gradient: Tensor, microbatch: int) -> None:
    rows = gradient.reshape(len(gradient), -1, gradient.shape[-1]) if gradient.dim() > 1 else gradient.reshape(1, 1, -1)
    sizes = _squares(rows)
    for key, part in own.items():
        told = {"name": part.name, "microbatch": microbatch}
        if key == "weight" and factor is not None and factor.sizes.shape == sizes.shape:
            theirs = rows @ signs(factor.dim, 0, rows.shape[-1], rows.dtype, rows.device)
            note("samples", told, rows=(theirs * factor.sketch).sum(1), mass=(sizes * factor.sizes).sum())
        elif key == "bias" and part.shape == (rows.shape[-1],):
            theirs = rows.sum(1) @ signs(0, 0, rows.shape[-1], rows.dtype, rows.device)
            note("samples", told, rows=theirs, mass=sizes.sum())
        else:
            note("mass", told, mass=sizes.sum())
