"""Megatron-LM's `megatron.core.dist_checkpointing`: a model's weights in a folder, by pipeflow's checkpoints. What is
saved under one layout can be loaded under any other.
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
from pipeflow.megatron.core.parallel_state import context_here


class ShardedStateDict(dict[str, Tensor]):
    """A rank's weights by their names, and the module that has them, which knows how they lie over the ranks."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        super().__init__({prefix + name: value for name, value in module.state_dict().items()})
        self.module, self.prefix = module, prefix


def save(sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """`pipeflow.save_checkpoint` of what `sharded_state_dict` gave, or of a dict of several such: the stages of a rank.
    All ranks call it together; they all must see the folder, and what was in it is replaced.

    Raises UsageError for anything else in it, and as `save_checkpoint`.
    """
    parts = _parts(sharded_state_dict)
    save_checkpoint(checkpoint_dir, nn.ModuleList(part.module for part in parts), names=_names(parts))


def load(sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """What was saved, as this rank holds it, for the models' `load_state_dict`. The models themselves and random states
    are left as they are. All ranks call it together.

    Raises UsageError as `save`, and as `load_checkpoint`.
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
                f"the entry {key!r} is no model's sharded_state_dict(): such alone can be saved and loaded here; for "
                "optimizers and all else there is pipeflow.save_checkpoint"
            )
    return list(sharded_state_dict.values())


def _names(parts: Sequence[ShardedStateDict]) -> Names:
    """Without the index that a part's module has in the list of all."""

    def name_of(stage: int, name: str) -> str:
        index, _, own = name.partition(".")
        return parts[int(index)].prefix + own

    return name_of
