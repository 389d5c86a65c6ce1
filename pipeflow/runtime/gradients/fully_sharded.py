"""Stages under torch's fully_shard (FSDP2): it averages their gradients itself, after the last backward of a step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeflow.core.errors import UsageError
from pipeflow.runtime.program.operations import Operation


def fully_sharded_in(module: nn.Module) -> list[FSDPModule]:
    """What fully_shard was applied to within `module`."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def is_fully_sharded(parameter: nn.Parameter) -> bool:
    """Whether torch holds it in parts, so that it is torch that averages its gradient."""
    return isinstance(parameter, DTensor)


def require_untied(parameters: Iterable[nn.Parameter]) -> None:
    """Raises UsageError for a tied weight that is sharded: its copies could not be summed before the average."""
    if any(map(is_fully_sharded, parameters)):
        raise UsageError(
            "a weight that other ranks hold too (tied, or of a bidirectional schedule) cannot be under fully_shard: "
            "leave its module out, as with fully_shard on each block and not on the stage"
        )


class Averaging(Operation):
    """Before the first backward of a step (False) or the last one of a stage (True): whether backwards from here on
    end in an average over the replicas. Until then fully_shard adds up.
    """

    __slots__ = ("modules", "now")

    def __init__(self, modules: list[FSDPModule], *, now: bool) -> None:
        self.modules = modules
        self.now = now

    def __call__(self) -> None:
        for module in self.modules:
            module.set_requires_gradient_sync(self.now, recurse=False)
            module.set_is_last_backward(self.now)
