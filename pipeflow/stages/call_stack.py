"""Surroundings: the activation checkpoint and the custom autograd.Function in which code runs, found on its stack."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # a class method
_FILE = torch.utils.checkpoint.__file__


class Surroundings(NamedTuple):
    """The checkpoint and the custom Function around a call.

    Attributes:
        checkpoint: the kind of the activation checkpoint around it, "reentrant" or "plain"; None without one.
        function: name of the custom autograd.Function in whose forward it is made; None without one. Reentrant
            checkpoints do not count.
    """

    checkpoint: str | None
    function: str | None


def surroundings(until: CodeType) -> Surroundings:
    """The surroundings of the caller, up to the frame that runs `until`."""
    checkpoint = function = None
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        if checkpoint is None and frame.f_code.co_filename == _FILE:
            checkpoint = _kind(frame)
        if frame.f_code is _APPLY and (made := frame.f_locals["cls"]) is not torch.utils.checkpoint.CheckpointFunction:
            function = made.__name__
        frame = frame.f_back
    return Surroundings(checkpoint, function)


def _kind(frame: Any) -> str:
    while frame is not None and frame.f_code.co_filename == _FILE:
        if frame.f_code.co_name == "forward":
            return "reentrant"
        frame = frame.f_back
    return "plain"
