"""What surrounds a recorded job: its rank, its groups of ranks, and the state of random numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import nn


def place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    contexts = sys.modules.get("pipeflow.parallel.context")
    if contexts is not None and (context := contexts.context_if_launched()) is not None:
        return context.rank, context.world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def groups(models: Sequence[nn.Module]) -> dict[str, int]:
    """The sizes of this process's groups, by their names."""
    contexts = sys.modules.get("pipeflow.parallel.context")
    is_ours = any(hasattr(model, "chunks") and hasattr(model, "schedule") for model in models)
    if is_ours and contexts is not None and (context := contexts.context_if_launched()) is not None:
        layout = context.layout
        return {"data": layout.data, "pipeline": layout.pipeline, "tensor": layout.tensor}
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    world = torch.distributed.distributed_c10d._world
    return {names: group.size() for group, names in world.pg_names.items()}


def random_state() -> str:
    """A digest of the random states of this process."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return sha256(b"".join(bytes(state.numpy().data) for state in states)).hexdigest()[:16]
