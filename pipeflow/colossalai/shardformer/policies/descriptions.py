"""What a policy says of modules, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class SubModuleReplacementDescription:
    """What takes the place of a submodule.

    Attributes:
        suffix: where it is within the module, such as `attention.self.query` or `layers[0]`.
        target_module: its `from_native_module(module, process_group=..., **kwargs)` makes the replacement.
        kwargs: for that.
        ignore_if_not_exist: leave modules alone that have no such submodule.
    """

    suffix: str
    target_module: Any
    kwargs: Mapping[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """What becomes of modules of one class.

    Attributes:
        attribute_replacement: new values by the attribute's path, such as `self.num_heads`; paths that a module lacks
            are left out, since nothing reads them.
        param_replacement: functions that are called with the module, to replace parameters of its own.
        sub_module_replacement: what takes the place of submodules.
        method_replacement: functions that become methods, by their names.
    """

    attribute_replacement: Mapping[str, Any] | None = None
    param_replacement: Sequence[Callable[[nn.Module], Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None
