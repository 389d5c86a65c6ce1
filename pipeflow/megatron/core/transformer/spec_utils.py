"""Megatron-LM's `megatron.core.transformer.spec_utils`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ModuleSpec:
    """The class of a layer."""

    module: type[nn.Module]
