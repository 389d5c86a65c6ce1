"""Megatron-LM's `megatron.core.dist_checkpointing`: saves and loads a model's weights as pipeflow's checkpoints, under
any layout.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeflow.checkpoint import state
from pipeflow.checkpoint.load import load_checkpoint
from pipeflow.checkpoint.pieces import Names
from pipeflow.checkpoint.save import save_checkpoint
from pipeflow.core.errors import UsageError
from pipeflow.megatron.parallel_state import context_here


class ShardedStateDict(dict[str, Tensor]):
    """A rank's weights by name, and their module, which knows how they are split over ranks."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        super().__init__({prefix + name: value for name, value in module.state_dict().items()})
        self.module, self.prefix = module, prefix


def save(sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Saves weights with `pipeflow.save_checkpoint`. All ranks call it together.

    Args:
        sharded_state_dict: the result of a model's `sharded_state_dict()`, or a dict of several, one per stage.
        checkpoint_dir: folder on storage that all ranks share; its contents are replaced.

    Raises UsageError for other contents of the dict, and as `save_checkpoint` does.
    """
    parts = _parts(sharded_state_dict)
    save_checkpoint(checkpoint_dir, nn.ModuleList(part.module for part in parts), names=_names(parts))


def load(sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Loads a checkpoint and returns this rank's weights, for the models' `load_state_dict`. The models themselves and
    random states are not changed. All ranks call it together.

    Args:
        sharded_state_dict: as in `save`.
        checkpoint_dir: the folder.

    Raises UsageError as `save` and `load_checkpoint` do.
    """
    parts = _parts(sharded_state_dict)
    copies = nn.ModuleList(copy.deepcopy(part.module) for part in parts)
    context = context_here()
    random = state.random_pieces(context)
    load_checkpoint(checkpoint_dir, copies, names=_names(parts))
    state.restore_random(context, random)
    loaded = [dict(ShardedStateDict(module, part.prefix)) for module, part in zip(copies, parts, strict=True)]
    if isinstance(sharded_state_dict, ShardedStateDict):
        return dict(loaded[0])
    return dict(zip(sharded_state_dict, loaded, strict=True))


def _parts(sharded_state_dict: Mapping[str, Any]) -> list[ShardedStateDict]:
    if isinstance(sharded_state_dict, ShardedStateDict):
        return [sharded_state_dict]
    for key, part in sharded_state_dict.items():
        if not isinstance(part, ShardedStateDict):
            raise UsageError(
                f"the entry {key!r} is not a model's sharded_state_dict(): use pipeflow.save_checkpoint for optimizers "
                "and other values"
            )
    return list(sharded_state_dict.values())


def _names(parts: Sequence[ShardedStateDict]) -> Names:
    """Names of tensors without the index of a part's module in the list of all parts."""

    def name_of(stage: int, name: str) -> str:
        index, _, own = name.partition(".")
        return parts[int(index)].prefix + own

    return name_of
