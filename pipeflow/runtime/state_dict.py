"""State dicts of a Pipeline: stages that were cut from a module have the names of that module. Must not contain:
checkpoints of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any
from weakref import WeakSet

from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.runtime.names import name_in_module
from pipeflow.stages.stage import ModuleStage

LOG = logging.getLogger("pipeflow")
PART = (
    "state_dict() has only the weights of rank %d's stages: save_checkpoint saves those of all ranks, and "
    "save_safetensors writes them into one folder"
)

_WARNED: WeakSet[nn.Module] = WeakSet()  # once is enough


def cut_prefixes(chunks: nn.ModuleList) -> tuple[str, ...]:
    """The prefixes of the chunks that were cut from a module."""
    return tuple(f"chunks.{index}." for index, chunk in enumerate(chunks) if isinstance(chunk, ModuleStage))


def add_hooks(model: Any) -> None:
    """Makes the state dicts of a Pipeline those of this file."""
    model.register_state_dict_pre_hook(_confirm)
    model.register_state_dict_post_hook(rename_saved)
    model.register_load_state_dict_pre_hook(_confirm)
    model.register_load_state_dict_pre_hook(rename_loaded)


def _confirm(model: Any, *_: object) -> None:
    """Waits until the last step of the optimizer is confirmed, which may undo it. A hook of `nn.Module.state_dict` and
    `load_state_dict`.
    """
    model.runner.confirmation.confirm()


def rename_saved(model: Any, state: MutableMapping[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """Gives the entries of a state dict the names in the module. A hook of `nn.Module.state_dict`."""
    context = model.context
    if context.pipeline_size * context.tensor.size > 1 and model not in _WARNED:
        _WARNED.add(model)
        LOG.warning(PART, context.rank)
    if cut := cut_prefixes(model.chunks):
        for name in [each for each in state if each.startswith(prefix)]:
            state[name_in_module(name, prefix.removesuffix("."), cut)] = state.pop(name)


def rename_loaded(model: Any, state: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    """Finds the entries of the stages under their names in the module, and leaves out those of other stages. A hook of
    `nn.Module.load_state_dict`. Raises UsageError for a whole weight of which this tensor rank has a part.
    """
    taken: set[str] = set()
    for cut in cut_prefixes(model.chunks):
        for name, own in model.chunks[int(cut.split(".")[1])].state_dict().items():
            if prefix + name in state:
                state[prefix + cut + name] = state[prefix + name]
                taken.add(prefix + name)
                _require_shape(model, name, own, state[prefix + name])
    for name in taken.union(prefix + name for name in model.names_in_module):
        state.pop(name, None)


def _require_shape(model: Any, name: str, own: Any, whole: Any) -> None:
    shapes = [tuple(getattr(each, "shape", ())) for each in (own, whole)]
    if model.context.tensor.size > 1 and shapes[0] != shapes[1]:
        raise UsageError(
            f"{name} is split over the tensor ranks, so this rank has a part of shape {shapes[0]}, not {shapes[1]}: "
            "load_state_dict does not split weights; save the module with safetensors, and use load_safetensors"
        )
