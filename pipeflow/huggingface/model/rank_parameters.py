"""The parameters that a rank owns: allocated from the meta device, and filled with values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeflow.checkpoint.pieces import local_tensors
from pipeflow.checkpoint.tensor_files import fill_piece
from pipeflow.runtime.devices import place
from pipeflow.runtime.pipeline import Pipeline


def make_owned(model: Pipeline) -> None:
    """Replaces this rank's parameters on the meta device by zeros on its own device. A parameter that is registered in
    several places stays one parameter.
    """
    made: dict[int, nn.Parameter] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=model.context.device)
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            owner._parameters[name] = made[id(parameter)]
    place(model, model.context.device)


def owned_names(model: Pipeline) -> list[str]:
    """Names in the whole model of this rank's parameters; the first name of each."""
    return [name for name, _ in model.named_parameters()]


def fill(model: Pipeline, values: Mapping[str, Tensor]) -> None:
    """Fills this rank's parameters from whole `values`, by name; split parameters get their part."""
    for local in local_tensors(model, model.context, None):
        if local.name in values:
            fill_piece(local.piece, values[local.name])
