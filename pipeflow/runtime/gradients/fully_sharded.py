"""Stages under torch's fully_shard (FSDP2), which averages their gradients itself, after the last backward of a step.
All code of the engine for it is here, except how a DTensor is distributed over ranks, which is in `parallel/sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from pipeflow.parallel.sharding import is_distributed
from pipeflow.runtime.program.operations import Operation


def fully_sharded_in(module: nn.Module) -> list[FSDPModule]:
    """The modules within `module` to which fully_shard was applied."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def fully_sharded_parameters(module: nn.Module) -> set[int]:
    """The ids of the parameters in `module` that fully_shard splits, and whose gradients it averages."""
    roots = fully_sharded_in(module)
    for root in roots:
        root.reshard()  # after an evaluation it may still hold whole parameters
    return {
        id(parameter)
        for root in roots
        if isinstance(root, nn.Module)
        for parameter in root.parameters()
        if is_distributed(parameter)
    }


def others_in(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and its children, except modules under fully_shard, which replaces their parameters as it needs them."""
    if not isinstance(module, FSDPModule):
        yield module
        for child in module.children():
            yield from others_in(child)


class Averaging(Operation):
    """Switches fully_shard's averaging over the replicas off before the first backward of a step, and on before the
    last backward of a stage. While it is off, fully_shard accumulates gradients.
    """

    __slots__ = ("modules", "now")

    def __init__(self, modules: list[FSDPModule], *, now: bool) -> None:
        self.modules = modules
        self.now = now

    def __call__(self) -> None:
        for module in self.modules:
            module.set_requires_gradient_sync(self.now, recurse=False)
            module.set_is_last_backward(self.now)
