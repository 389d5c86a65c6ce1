"""Parameters under fully_shard."""

from __future__ import annotations

from typing import Any


def drop_gradients(parameter: Any) -> None:
    """Drops what an FSDPParam has accumulated of gradients of the whole parameter. Nothing public does."""
    if "unsharded_accumulated_grad" in vars(parameter):  # before torch 2.15
        parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):  # made by the first gather
        parameter._unsharded_param.grad = None


__all__ = ["drop_gradients"]
