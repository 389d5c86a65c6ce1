"""Paths of a policy: where in a module a submodule or an attribute is."""

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
    """Where a submodule is, and what takes its place."""

    parent: nn.Module
    key: str
    native: nn.Module
    description: SubModuleReplacementDescription


def places_in(module: nn.Module, description: ModulePolicyDescription) -> Iterator[Place]:
    """Those of the submodules that are replaced, but for what is already of its new class.

    Raises UsageError for a suffix that leads nowhere, unless that may be.
    """
    for each in description.sub_module_replacement or ():
        parent, key = at(module, each.suffix)
        native = _step(parent, key)
        if isinstance(parent, nn.Module) and isinstance(native, nn.Module):
            if not isinstance(each.target_module, type) or not isinstance(native, each.target_module):
                yield Place(parent, key, native, each)
        elif not each.ignore_if_not_exist:
            raise UsageError(
                f"suffix {each.suffix!r} of the policy is no submodule of {type(module).__name__}, which has "
                f"{', '.join(name for name, _ in module.named_modules() if name)}; set ignore_if_not_exist=True where "
                "only some modules have it"
            )


def at(module: nn.Module, path: str) -> tuple[Any, str]:
    """What has the last step of a path such as `layers[0].attention`, or None where there is nothing, and that step."""
    *before, last = [step for step in re.split(r"[.\[\]]+", path) if step]
    return reduce(_step, before, module), last


def has(owner: Any, key: str) -> bool:
    """Whether there is such a step."""
    return _step(owner, key) is not None


def _step(owner: Any, step: str) -> Any:
    """What is there; None where nothing is."""
    if owner is None or not step.isdecimal():
        return getattr(owner, step, None)
    if isinstance(owner, nn.Module):
        return owner._modules.get(step)
    return owner[int(step)] if int(step) < len(owner) else None


def is_elsewhere(*modules: nn.Module) -> bool:
    """Whether another stage has parameters of theirs: here plain tensors stand for them."""
    return any(isinstance(value, Tensor) for each in modules for value in vars(each).values())
