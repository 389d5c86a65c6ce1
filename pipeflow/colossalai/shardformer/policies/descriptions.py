"""Descriptions of replacements in modules, for policies, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class SubModuleReplacementDescription:
    """A replacement of a submodule.

    Attributes:
        suffix: path of the submodule in the module, such as `attention.self.query` or `layers[0]`.
        target_module: class whose `from_native_module(module, process_group=..., **kwargs)` makes the replacement.
        kwargs: further arguments of that method.
        ignore_if_not_exist: skip modules without such a submodule, instead of raising an error.
    """

    suffix: str
    target_module: Any
    kwargs: Mapping[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """The replacements in modules of one class.

    Attributes:
        attribute_replacement: new values by the attribute's path, such as `self.num_heads`; paths that a module lacks
            are skipped.
        param_replacement: functions that are called with the module and replace its own parameters.
        sub_module_replacement: replacements of submodules.
        method_replacement: functions that become methods, by the method's name.
    """

    attribute_replacement: Mapping[str, Any] | None = None
    param_replacement: Sequence[Callable[[nn.Module], Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None
