"""WithoutGpu: runs code that was written for GPUs on a machine without one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutGpu(TorchFunctionMode):
    """Inside the `with` block, torch's functions use the CPU wherever the code says "cuda"."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_there, args), **{name: _there(value) for name, value in (kwargs or {}).items()})


def _there(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return torch.device("cpu")
    if isinstance(argument, str) and re.fullmatch(r"cuda(:\d+)?", argument):
        return "cpu"
    return argument
