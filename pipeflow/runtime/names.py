"""Names under torch.compile: what a module and its tensors are called, whether or not it has wrapped them."""

from __future__ import annotations

from torch import nn

COMPILED = "_orig_mod"  # the attribute in which torch.compile keeps the module that it wrapped


def plain_name(name: str) -> str:
    """The name within the module that was compiled.

    >>> plain_name("_orig_mod.block3._orig_mod.weight")
    'block3.weight'
    """
    return name.replace(f"{COMPILED}.", "")


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped; `module` itself where it did not."""
    inner: nn.Module = getattr(module, COMPILED, module)
    return inner
