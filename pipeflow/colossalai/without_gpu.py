"""WithoutGpu: a script that was written for GPUs, where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutGpu(TorchFunctionMode):
    """Inside, what torch's functions are told to put on "cuda" is put on the CPU."""

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
