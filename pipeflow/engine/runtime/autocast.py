"""Autocast: the region of torch.autocast in which stages and criterion of a step run; backwards run outside of it, as
torch recommends.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


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
