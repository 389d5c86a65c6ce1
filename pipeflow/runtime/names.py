"""Names: the names of a module and its tensors, whether or not torch.compile has wrapped them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

COMPILED = "_orig_mod"  # the attribute in which torch.compile keeps the module that it wrapped


def plain_name(name: str) -> str:
    """The name in the original module, without the prefixes that torch.compile adds.

    >>> plain_name("_orig_mod.block3._orig_mod.weight")
    'block3.weight'
    """
    return name.replace(f"{COMPILED}.", "")


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or `module` itself if it is not wrapped."""
    inner = module._modules.get(COMPILED)
    return module if inner is None else inner


def name_in_module(name: str, prefix: str, cut: Collection[str]) -> str:
    """The name without the first prefix in `cut` that follows `prefix` in it.

    >>> name_in_module("model.chunks.1.layers.3.weight", "model", {"chunks.1."})
    'model.layers.3.weight'
    """
    start = f"{prefix}." if prefix else ""
    own = name.removeprefix(start)
    found = next((each for each in cut if own.startswith(each)), "")
    return start + own.removeprefix(found)
