"""Stages under torch's fully_shard (FSDP2), which averages their gradients itself, after the last backward of a step.
All code of the engine for it is here, except how a DTensor is distributed over ranks, which is in `parallel/sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.fsdp import FSDPModule

from pipeflow.core.action import Action
from pipeflow.engine.parallel.sharding import is_distributed
from pipeflow.engine.parallel.transport.protocol import Work
from pipeflow.engine.runtime.program.operations import Beside
from pipeflow.engine.torch_private.distributed import drop_gradients


def fully_sharded_in(module: nn.Module) -> list[FSDPModule]:
    """The modules within `module` to which fully_shard was applied."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def fully_sharded_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters in `module` that fully_shard splits, and whose gradients it averages."""
    roots = fully_sharded_in(module)
    for root in roots:
        root.reshard()  # after an evaluation it may still hold whole parameters
    return {
        parameter
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


def average(modules: list[FSDPModule], *, now: bool) -> None:
    """Switches fully_shard's averaging over the replicas off before the first backward of a step, and on (`now`) before
    the last backward of a stage. While it is off, fully_shard accumulates gradients. A step begins with sharded
    weights, also after one that failed while they were whole.
    """
    if not now:
        reshard_all(modules)
    for module in modules:
        module.set_requires_gradient_sync(now, recurse=False)
        module.set_is_last_backward(now)


class Unshard(Beside):
    """U: starts to gather the weights of a stage. They stay whole after forwards and backwards, until the reshard."""

    def __init__(self, action: Action, modules: list[FSDPModule]) -> None:
        super().__init__(action)
        self.modules = modules
        self.handles: list[Any] = []

    def begin(self) -> list[Work]:
        for module in self.modules:
            _keep_whole(module)
        self.handles = [module.unshard(async_op=True) for module in self.modules]
        results = [group._all_gather_result for group in _groups(self.modules)]
        return [each.all_gather_work for each in results if each is not None and each.all_gather_work is not None]

    def end(self) -> None:
        """Waits until the weights are whole, and puts them into the modules."""
        super().end()
        for handle in self.handles:
            handle.wait()
        self.handles = []


def reshard_all(modules: list[FSDPModule]) -> None:
    """Frees whole weights, and restores the reshard settings of the modules."""
    for module in modules:
        module.reshard()
    for group in _groups(modules):
        if (settings := _SETTINGS.pop(group, None)) is not None:
            group.post_forward_mesh_info, group.reshard_after_backward = settings


def forget_step(modules: list[FSDPModule]) -> None:
    """Call when a step has failed, on this rank alone: frees whole weights, and drops the gradients that modules have
    accumulated.
    """
    for group in _groups(modules):
        group._all_gather_result = None  # torch would wait for a gather, which other replicas may never begin
        for each in group.fsdp_params:
            drop_gradients(each)
    for module in modules:
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()


def _keep_whole(module: FSDPModule) -> None:
    """Makes a module keep whole weights, and notes its own settings."""
    module._get_fsdp_state()._lazy_init()  # the first forward would do it, and set after_forward
    for group in _groups([module]):
        _SETTINGS.setdefault(group, (group.post_forward_mesh_info, group.reshard_after_backward))
    module.set_reshard_after_forward(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)


_SETTINGS: WeakKeyDictionary[Any, tuple[Any, bool]] = WeakKeyDictionary()
"""Of the groups that are kept whole now: whether they are resharded after forwards, if not None, and after backwards.
torch has functions that set this, and none that reads it.
"""


def _groups(modules: list[FSDPModule]) -> Iterator[Any]:
    """The groups of parameters that fully_shard gathers together."""
    for module in modules:
        yield from module._get_fsdp_state()._fsdp_param_groups
