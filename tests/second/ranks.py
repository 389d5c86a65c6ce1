"""Ranks that compute on the second device, each a process: what they send goes over a stand-in of NCCL's groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeflow import launch
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport import nccl
from pipeflow.engine.parallel.transport.agreement import all_gather
from tests.second.device import NAME, is_there, plain, register


class Group:
    """A group that moves the second device's tensors, and no others, as NCCL moves those of GPUs."""

    class Options:
        """The options of NCCL that are set."""

        def __init__(self) -> None:
            self._timeout = timedelta(days=1)
            self.config = SimpleNamespace(max_ctas=None, cga_cluster_size=None)

    def __init__(self, *place: Any) -> None:
        *self._place, _ = place
        self._moving: list[tuple[Any, Any]] = []  # work, and the tensors that it needs

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connects the group."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        store, rank, size = self._place
        self._gloo = gloo(store, rank, size, options)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            work = getattr(self._gloo, name)(*tree_map(_memory, arguments), **options)
            if isinstance(work, dist.Work):
                self._moving = [each for each in self._moving if not each[0].is_completed()] + [(work, arguments)]
            return work

        return call

    def abort(self) -> None:
        """Does nothing: gloo's groups end with their processes."""


def _memory(each: Any) -> Any:
    if not isinstance(each, Tensor):
        return each
    if not is_there(each) or not each.is_contiguous():
        raise RuntimeError(f"NCCL moves contiguous tensors of its device, not one on {each.device}")
    return plain(each)


def on_second_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(*arguments)` in a rank that is a process, launched again to compute on the second device, and
    returns its result.
    """
    device, layout = register(), current_context().layout
    all_gather(current_context().world, [0.0])  # when all have been launched
    current_context().close()
    with (
        patch("pipeflow.engine.parallel.launcher.own_device", lambda _: device),
        patch("torch.utils.swap_tensors", torch._C._swap_tensor_impl),
        patch.object(nccl, "DEVICE", NAME),
        patch.object(dist, "ProcessGroupNCCL", Group, create=True),
    ):
        launch(layout.pipeline, layout.tensor)
        return function(*arguments)
