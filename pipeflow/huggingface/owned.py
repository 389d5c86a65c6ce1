"""The parameters that a rank owns: they come from the meta device into memory, and get values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeflow.checkpoint.pieces import local_tensors
from pipeflow.checkpoint.tensor_files import fill_piece
from pipeflow.runtime.devices import place
from pipeflow.runtime.pipeline import Pipeline


def make_owned(model: Pipeline) -> None:
    """Puts zeros in the place of the parameters of this rank that are on the meta device, on the device where it
    computes. A parameter that has several places stays one.
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
    """Those that the parameters of this rank have in the whole model, each by its first one."""
    return [name for name, _ in model.named_parameters()]


def fill(model: Pipeline, values: Mapping[str, Tensor]) -> None:
    """Gives parameters of this rank their values, or their parts of these, which come whole and by name."""
    for local in local_tensors(model, model.context, None):
        if local.name in values:
            fill_piece(local.piece, values[local.name])
