"""Keys: the names that checkpoints use for a model's parameters and buffers, and conversions between the two. From
transformers 5 on its own functions tell; version 4.57 has them only inside its loading, so they are written out here.
Must not contain: files, or ranks.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError

_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
Shapes = Callable[[str], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Source:
    """Tensors of a checkpoint, and the model's tensors that are made from them.

    Attributes:
        keys: names in the checkpoint.
        names: names of the model's tensors; the model may lack some.
        convert: makes the model's tensors, by name, from the checkpoint's, in the order of `keys`; None if a tensor
            stays as it is.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    convert: Callable[[list[Tensor]], Mapping[str, Tensor]] | None = None


Target = tuple[tuple[str, ...], Callable[[Tensor], Mapping[str, Tensor]]]
"""A tensor of the model in a checkpoint: the keys of tensors there, and the function that makes them from it."""


def names_of(skeleton: Any) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and persistent buffer, by each of its names; the one in checkpoints comes first."""
    tensors = skeleton.state_dict(keep_vars=True)
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_tensor[id(tensor)].append(name)
    tied = getattr(skeleton, "all_tied_weights_keys", None)
    aliases = set(tied if tied is not None else getattr(skeleton, "_tied_weights_keys", None) or ())
    ordered = {key: tuple(sorted(names, key=aliases.__contains__)) for key, names in by_tensor.items()}
    return {name: ordered[id(tensor)] for name, tensor in tensors.items()}


def sources_of(skeleton: Any, keys: Iterable[str], shape: Shapes) -> list[Source]:
    """The Sources of a checkpoint's tensors; `shape` returns the shape of one by its key.

    Raises UsageError if they cannot be converted.
    """
    known = dict.fromkeys(skeleton.state_dict(keep_vars=True), True)
    conversions = _conversions(skeleton, legacy=True)
    if conversions is None:
        return [Source((key,), (_renamed(skeleton, key, known),)) for key in keys]
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, _Group] = {}
    found: list[Source] = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if pattern is None:
            found.append(Source((key,), (name,)))
        else:
            group = groups.setdefault(name, _Group(skeleton, name, by_pattern[pattern], []))
            group.members.append((pattern, key))
    return found + [group.source(shape) for group in groups.values()]


def _conversions(skeleton: Any, *, legacy: bool) -> list[Any] | None:
    """The conversions of transformers for checkpoints of such a model; None if it does not tell."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    found: list[Any] = get_model_conversion_mapping(skeleton, add_legacy=legacy)
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that a converter of transformers takes together, each with the pattern that matches its key."""

    skeleton: Any
    first: str
    converter: Any
    members: list[tuple[str, str]]

    def source(self, shape: Shapes) -> Source:
        """The group as a Source. Raises UsageError if the converter fails."""
        keys = tuple(key for _, key in self.members)
        try:
            names = self.convert([torch.empty(tuple(shape(key)), device="meta") for key in keys])
        except Exception as error:  # of any operation of transformers
            raise UsageError(
                f"{keys[0]} and {len(keys) - 1} other tensors cannot be converted to {self.first} with transformers' "
                f"{self.converter.operations}: {error}"
            ) from error
        return Source(keys, tuple(names), self.convert)

    def convert(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """The model's tensors that are made from the checkpoint's, by name."""
        converter = copy.deepcopy(self.converter)
        for (pattern, key), tensor in zip(self.members, tensors, strict=True):
            converter.add_tensor(self.first, key, pattern, tensor)
        made = converter.convert(self.first, model=self.skeleton, config=self.skeleton.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _renamed(skeleton: Any, key: str, known: Mapping[str, bool]) -> str:
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


def targets_of(skeleton: Any) -> dict[str, Target]:
    """The Target of each parameter and persistent buffer, by its name.

    Raises UsageError if several tensors have to be converted together.
    """
    names = {name: same[0] for name, same in names_of(skeleton).items()}
    made = _reverted_targets(skeleton, set(names.values()))
    return {name: made[first] for name, first in names.items()}


def _reverted_targets(skeleton: Any, names: set[str]) -> dict[str, Target]:
    conversions = _conversions(skeleton, legacy=False)
    if conversions is None:
        return {name: as_it_is(_reverted(skeleton, name)) for name in names}
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
    if not conversions:
        return {name: as_it_is(name) for name in names}
    skeleton._weight_conversions = conversions

    def revert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        reverted: dict[str, Tensor] = revert_weight_conversion(skeleton, dict(tensors))
        return reverted

    tensors = {name: torch.empty_like(skeleton.state_dict()[name], device="meta") for name in names}
    together = revert(tensors)
    by_id = {id(tensor): key for key, tensor in together.items()}
    found: dict[str, Target] = {}
    left = set(together)
    for name, tensor in tensors.items():
        if id(tensor) in by_id:
            found[name] = as_it_is(by_id[id(tensor)])
        else:
            found[name] = _converted(name, tensor, revert)
        keys = set(found[name][0])
        if not keys <= left:
            raise UsageError(f"{name} cannot be saved alone: its format needs other parameters too")
        left -= keys
    return found


def as_it_is(key: str) -> Target:
    """The Target of a tensor that checkpoints have under the name `key`."""
    return (key,), lambda tensor: {key: tensor}


def _converted(name: str, tensor: Tensor, revert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> Target:
    try:
        keys = tuple(revert({name: tensor}))
    except Exception as error:  # of any operation of transformers
        raise UsageError(f"{name} cannot be converted to the format of checkpoints: {error}") from error
    return keys, lambda whole: revert({name: whole})


def _reverted(skeleton: Any, name: str) -> str:
    for pattern, instead in (getattr(skeleton, "_checkpoint_conversion_mapping", None) or {}).items():
        theirs = re.sub(r"\(.*\)", "", pattern.lstrip("^"))
        name, changed = re.subn(instead.lstrip("^"), theirs, name)
        if changed:
            break
    return name
