"""Lightning's own values in a checkpoint of pipeflow: one tensor of bytes, as torch saves them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeflow.checkpoint import state
from pipeflow.checkpoint.manifest import verified
from pipeflow.checkpoint.storage import CheckpointStorage
from pipeflow.core.errors import UsageError


def packed(values: Any) -> Tensor:
    """The values as bytes."""
    body = io.BytesIO()
    torch.save(values, body)
    return torch.frombuffer(bytearray(body.getvalue()), dtype=torch.uint8)


def unpacked(folder: Path, weights_only: bool | None) -> Any:
    """The values in a checkpoint. Raises UsageError if it has none."""
    kept = state.read_run(CheckpointStorage(folder, verified(folder, 0, 0)))["extra"]
    if not isinstance(kept, Tensor):
        raise UsageError(f"{folder} was not saved with a PipelineStrategy: load it with pipeflow.load_checkpoint")
    return torch.load(io.BytesIO(kept.numpy().tobytes()), "cpu", weights_only=bool(weights_only))  # as Lightning does
