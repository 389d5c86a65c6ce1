"""Blocks of DTensors, and the files of distributed checkpoints."""

from __future__ import annotations

from pipeflow.engine.torch_private import needed

with needed():
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "StorageInfo",  # where a tensor is in the files of a checkpoint: the metadata of a checkpoint has its objects
    "compute_local_shape_and_global_offset",  # of a DTensor's block; nothing public says it for every placement
]
