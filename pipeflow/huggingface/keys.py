"""Keys: what checkpoints call the parameters and buffers of a model. Renames are transformers' own, where it has them
as functions (from 5.0 on), else those of which 4.57 says so itself. What must not live here: files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from pipeflow.core.errors import UsageError

_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def names_of(skeleton: Any) -> dict[str, tuple[str, ...]]:
    """The names of parameters and persistent buffers, and with each those of the same tensor, the one that checkpoints
    have in front.
    """
    tensors = skeleton.state_dict(keep_vars=True)
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    aliases = _aliases(skeleton)
    ordered = {key: tuple(sorted(names, key=aliases.__contains__)) for key, names in by_tensor.items()}
    return {name: ordered[id(tensor)] for name, tensor in tensors.items()}


def _aliases(skeleton: Any) -> set[str]:
    """The names under which checkpoints do not have tensors that have others, too."""
    tied = getattr(skeleton, "all_tied_weights_keys", None)
    if tied is None:
        tied = getattr(skeleton, "_tied_weights_keys", None) or ()
    return set(tied)


def loaded_names(skeleton: Any, stored: Iterable[str]) -> dict[str, str]:
    """By the key that a checkpoint has: what the model calls that tensor, which it may not have.

    Raises UsageError where the values have to be converted, too.
    """
    known = dict.fromkeys(skeleton.state_dict(keep_vars=True), True)
    conversions = _conversions(skeleton, legacy=True)
    if conversions is None:
        return {key: _renamed(skeleton, key, known) for key in stored}
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    found: dict[str, str] = {}
    for key in stored:
        name, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, known)
        if pattern is not None:
            raise UsageError(f"{key} has to be converted to become {name}, which is not supported")
        found[key] = name
    return found


def _conversions(skeleton: Any, *, legacy: bool) -> list[Any] | None:
    """What transformers does to checkpoints of such a model; None where it does not tell."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    found: list[Any] = get_model_conversion_mapping(skeleton, add_legacy=legacy)
    return found


def _renamed(skeleton: Any, key: str, known: dict[str, bool]) -> str:
    for old, new in _LEGACY.items():
        if key.endswith(old):
            key = key.removesuffix(old) + new
    for pattern, instead in (getattr(skeleton, "_checkpoint_conversion_mapping", None) or {}).items():
        key, changed = re.subn(pattern, instead, key)
        if changed:
            break
    prefix = f"{skeleton.base_model_prefix}."
    if key.startswith(prefix) and key.removeprefix(prefix) in known:
        return key.removeprefix(prefix)
    return prefix + key if key not in known and prefix + key in known else key


def stored_names(skeleton: Any) -> dict[str, str]:
    """By the name of each parameter and persistent buffer: the key that a checkpoint is to have for it.

    Raises UsageError where the values have to be converted, too.
    """
    names = {name: same[0] for name, same in names_of(skeleton).items()}
    conversions = _conversions(skeleton, legacy=False)
    if conversions is None:
        return {name: _reverted(skeleton, first) for name, first in names.items()}
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
    if not conversions:
        return names
    skeleton._weight_conversions = conversions
    keys: dict[str, str] = {}
    for name in set(names.values()):
        tensor = torch.empty(0)
        reverted = list(revert_weight_conversion(skeleton, {name: tensor}).items())
        if len(reverted) != 1 or reverted[0][1] is not tensor:
            raise UsageError(f"{name} has to be converted to be saved, which is not supported")
        keys[name] = reverted[0][0]
    return {name: keys[first] for name, first in names.items()}


def _reverted(skeleton: Any, name: str) -> str:
    for pattern, instead in (getattr(skeleton, "_checkpoint_conversion_mapping", None) or {}).items():
        theirs = re.sub(r"\(.*\)", "", pattern.lstrip("^"))
        name, changed = re.subn(instead.lstrip("^"), theirs, name)
        if changed:
            break
    return name
