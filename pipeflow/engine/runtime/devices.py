"""Devices: makes sure that a rank's modules and batches are on its device; and the region of torch.autocast in which
stages and criterion of a step run there. Backwards run outside of it, as torch recommends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError


def place(module: nn.Module, device: torch.device) -> None:
    """Moves `module` from the CPU to `device`. Tensors on the meta device stay there; call `to_empty` on them first.

    Raises UsageError if a tensor is on another device.
    """
    meta = torch.device("meta")
    found = {tensor.device for _, tensor in named_tensors(module)} - {_exactly(device)}
    for name, tensor in named_tensors(module):
        if tensor.device in found - {torch.device("cpu"), meta}:
            raise UsageError(
                f"{name} is on {tensor.device}, but this rank computes on {device}: move it there, or pass "
                "launch(device=...)"
            )
    if meta in found:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    elif found:
        module.to(device)


def require_placed(module: nn.Module, device: torch.device) -> None:
    """Raises UsageError unless all tensors of `module` are on `device`."""
    for name, tensor in named_tensors(module):
        if tensor.device == _exactly(device):
            continue
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device: call to_empty(device={str(device)!r}) on its stage and give it values "
                "before the first step"
            )
        raise UsageError(f"{name} is on {tensor.device}, but this rank computes on {device}: move it there")


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. A copy from the host to a GPU is beside the computations: it waits for none of them, and
    neither does the host, which would if the memory is not pinned.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=device.type == "cuda")  # one to the CPU must be complete
    computing, copying = torch.cuda.current_stream(device), side_stream(device, "batch")
    with torch.cuda.stream(copying):
        made = tensor.to(device, non_blocking=True)
    computing.wait_stream(copying)
    made.record_stream(computing)  # which uses memory of the other stream
    return made


@cache
def side_stream(device: torch.device, _: Hashable) -> torch.cuda.Stream:
    """A stream of a GPU beside that of the computations, one for each use."""
    return torch.cuda.Stream(device)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of `module`, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _exactly(device: torch.device) -> torch.device:
    """The device with its index, as tensors report it: "cuda" is the current one."""
    return torch.empty(0, device=device).device


def region_of(device_type: str, dtype: torch.dtype | None = None) -> torch.autocast | None:
    """The region for devices of this type, which also decorates functions: of `dtype`, or else like the caller's; None
    if there is none.
    """
    if dtype is not None:
        return torch.autocast(device_type, dtype)
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, cache_enabled=torch.is_autocast_cache_enabled())


def outside(region: torch.autocast | None) -> AbstractContextManager[Any]:
    """A context manager that leaves `region`, if there is one.

    torch keeps converted weights until the outermost region ends. So within this one, calls in `region` share them:
    the microbatches of a step need one copy of each weight, not one each.
    """
    return nullcontext() if region is None else torch.autocast(region.device, enabled=False)
