"""Libraries: the options with which other libraries train as a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pipeflow.planning.libraries import deepspeed, megatron, torchtitan
from pipeflow.planning.libraries.library import Library, LibraryOptions

LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {"megatron": megatron.LIBRARY, "torchtitan": torchtitan.LIBRARY, "deepspeed": deepspeed.LIBRARY}
)
"""The libraries whose options are written, by the names that `pipeflow plan --for` takes."""

__all__ = ["LIBRARIES", "Library", "LibraryOptions"]
