"""Paths in a policy: find submodules and attributes in a module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeflow.colossalai.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from pipeflow.core.errors import UsageError


class Place(NamedTuple):
    """The place of a submodule, and its replacement."""

    parent: nn.Module
    key: str
    native: nn.Module
    description: SubModuleReplacementDescription


def places_in(module: nn.Module, description: ModulePolicyDescription) -> Iterator[Place]:
    """The places of the submodules to replace, without those that already have their new class.

    Raises UsageError for a suffix that matches no submodule, unless `ignore_if_not_exist`.
    """
    for each in description.sub_module_replacement or ():
        parent, key = at(module, each.suffix)
        native = _step(parent, key)
        if isinstance(parent, nn.Module) and isinstance(native, nn.Module):
            if not isinstance(each.target_module, type) or not isinstance(native, each.target_module):
                yield Place(parent, key, native, each)
        elif not each.ignore_if_not_exist:
            raise UsageError(
                f"suffix {each.suffix!r} of the policy is not a submodule of {type(module).__name__}, which has "
                f"{', '.join(name for name, _ in module.named_modules() if name)}; set ignore_if_not_exist=True if "
                "only some modules have it"
            )


def at(module: nn.Module, path: str) -> tuple[Any, str]:
    """The owner of the last step of a path such as `layers[0].attention` (None if it does not exist), and that step."""
    *before, last = [step for step in re.split(r"[.\[\]]+", path) if step]
    return reduce(_step, before, module), last


def has(owner: Any, key: str) -> bool:
    """True if the owner has this step."""
    return _step(owner, key) is not None


def _step(owner: Any, step: str) -> Any:
    """The object at this step; None if there is none."""
    if owner is None or not step.isdecimal():
        return getattr(owner, step, None)
    if isinstance(owner, nn.Module):
        return owner._modules.get(step)
    return owner[int(step)] if int(step) < len(owner) else None


def is_elsewhere(*modules: nn.Module) -> bool:
    """True if another stage has some of their parameters; plain tensors replace them here."""
    return any(isinstance(value, Tensor) for each in modules for value in vars(each).values())
