"""Initial weights for both runs: a plain run keeps its own, and each rank of a parallel run takes its parts of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeflow.checking.parts import Part, Parts, own_values, parts_of
from pipeflow.core.errors import UsageError

INDEX, VALUES = "weights.json", "weights.f32"


def keep_weights(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Writes the parameters and buffers of a model that is whole in this process, as float32, for `take_weights`.

    Args:
        folder: where they go; that of the recording will do.
        model: the module.

    Raises UsageError if this process has only parts of the model.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    start = 0
    with (path / VALUES).open("wb") as file:
        for part in parts_of([model], None, None):
            values = own_values(part.tensor).detach()
            if tuple(values.shape) != part.shape:
                raise UsageError(f"this process has only a part of {part.name}: keep the weights of the plain run")
            file.write(values.to("cpu", torch.float32).contiguous().numpy().tobytes())
            index[part.name] = {"shape": part.shape, "start": start}
            start += values.numel()
    (path / INDEX).write_text(json.dumps(index))


def take_weights(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    parts: Parts | None = None,
    names: Callable[[str], str] | None = None,
) -> None:
    """Fills this rank's parts of a model with the weights that a plain run kept. Call it before optimizers copy them.

    Args:
        folder: that of `keep_weights`.
        model: this rank's module.
        parts, names: as in `record`.

    Raises UsageError if the folder has no weights, or lacks one of the model or has it in another shape.
    """
    path = Path(folder)
    try:
        index = json.loads((path / INDEX).read_text())
        values = np.memmap(path / VALUES, "<f4", "r")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} has no weights: write them with pipeflow.checking.keep_weights ({error})"
        ) from error
    with torch.no_grad():
        for part in parts_of([model], parts, names):
            _fill(part, torch.from_numpy(np.array(_whole(path, index, values, part))))


def _whole(path: Path, index: Any, values: Any, part: Part) -> Any:
    known = index.get(part.name) if isinstance(index, dict) else None
    if not isinstance(known, dict) or known.get("shape") != list(part.shape) or type(known.get("start")) is not int:
        raise UsageError(
            f"{path} has no {part.name} of shape {part.shape}: pass names, or parts if it is split by hand"
        )
    end = known["start"] + prod(part.shape)
    if not 0 <= known["start"] <= end <= len(values):
        raise UsageError(f"{path / VALUES} is damaged: it ends before {part.name}; keep the weights again")
    return values[known["start"] : end].reshape(part.shape)


def _fill(part: Part, whole: torch.Tensor) -> None:
    for block in part.cut(part.tensor):
        where = tuple(slice(start, start + size) for start, size in zip(block.offset, block.values.shape, strict=True))
        block.values.detach().copy_(whole[where or ...])
