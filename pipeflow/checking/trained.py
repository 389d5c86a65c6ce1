"""What a script trains: the modules to record, found when one of them is called for the first time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

_TRIALS = ("_forward_metadata_inference", "_backward_metadata_inference")  # torch's pipelining learns shapes


def trained_around(module: nn.Module) -> Sequence[nn.Module]:
    """The modules that are trained where `module` is called: the outermost one with it inside that calls it, or all
    stages of torch's pipelining on this rank. Empty if it is not trained here, or a Pipeline runs or traces it.
    """
    if not module.training or not any(each.requires_grad for each in module.parameters()):
        return []
    if any(isinstance(getattr(type(each), "pipeline", None), property) for each in module.modules()):
        return []  # a wrapper that trains a Pipeline
    found: Sequence[nn.Module] = [module]
    for frame in _frames():
        if str(frame.f_globals.get("__name__")).startswith("pipeflow.") or frame.f_code.co_name in _TRIALS:
            return []
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and any(each is found[0] for each in owner.modules()):
            found = [owner]
        elif stages := _stages_of(owner):
            found = stages
    return found


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stages_of(owner: Any) -> list[nn.Module]:
    """The stages that a schedule of torch's pipelining runs on this rank."""
    if "torch.distributed.pipelining.schedules" not in {each.__module__ for each in type(owner).__mro__}:
        return []
    stages = owner._stages if hasattr(owner, "_stages") else [owner._stage]
    return [stage.submod for stage in stages]
