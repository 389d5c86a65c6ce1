"""What a tensor of a module is called, whether or not torch.compile has wrapped what it is in."""

from __future__ import annotations

COMPILED = "_orig_mod."  # what torch.compile puts before the names within


def plain_name(name: str) -> str:
    """The name within the module that was compiled.

    >>> plain_name("_orig_mod.block3._orig_mod.weight")
    'block3.weight'
    """
    return name.replace(COMPILED, "")
