"""Stages under torch's fully_shard (FSDP2): it averages their gradients itself, after the last backward of a step. All
that the engine knows of it is here; how a DTensor lies over the ranks is in `parallel/sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from pipeflow.parallel.sharding import is_distributed
from pipeflow.runtime.program.operations import Operation


def fully_sharded_in(module: nn.Module) -> list[FSDPModule]:
    """What fully_shard was applied to within `module`."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def fully_sharded_parameters(module: nn.Module) -> set[int]:
    """The ids of the parameters in `module` that fully_shard holds in parts, of which it averages the gradients."""
    roots = fully_sharded_in(module)
    for root in roots:
        root.reshard()  # one that was evaluated last may still be whole
    return {
        id(parameter)
        for root in roots
        if isinstance(root, nn.Module)
        for parameter in root.parameters()
        if is_distributed(parameter)
    }


def others_in(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and its children, but for what is under fully_shard, which replaces parameters as it needs them."""
    if not isinstance(module, FSDPModule):
        yield module
        for child in module.children():
            yield from others_in(child)


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
