"""Context: this process's place among the others. The one state that a process keeps, as torch keeps its default
process group; in a context variable, so that ranks may be threads.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeflow.core.errors import UsageError
from pipeflow.parallel.failure import Alarm
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.parallel.transport.view import View


@dataclass(eq=False)
class SharedWeight:
    """A weight that `ranks` share, with the copies that this rank registered, each a list of parameters: one copy, but
    for a weight of a single rank, whose further copies become the first. It keeps no parameter alive.
    """

    ranks: tuple[int, ...]
    copies: list[list[ref[nn.Parameter]]] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The first copy; empty when it was not registered, or is gone."""
        found = [reference() for reference in self.copies[0]] if self.copies else []
        return [parameter for parameter in found if parameter is not None]


@dataclass(eq=False)
class Context:
    """This process's place, and what connects it to the others.

    Attributes:
        rank: in the world.
        layout: how the world's ranks are laid out.
        device: where this process computes.
        world: the transport of all ranks.
        transport: that of this rank's pipeline.
        replicas: that of the ranks of `data`.
        tensor: the group that holds the other parts of the same layers.
        data: the group that holds the same weights for other data.
        shared: the tied weights that were registered.
        alarm: tells every rank of a failure on one.
    """

    rank: int
    layout: Layout
    device: torch.device
    world: Transport
    shared: list[SharedWeight] = field(default_factory=list)
    transport: Transport = field(init=False)
    replicas: Transport = field(init=False)
    tensor: Group = field(init=False)
    data: Group = field(init=False)
    alarm: Alarm = field(init=False)

    def __post_init__(self) -> None:
        self.transport = View(self.world, self.layout.pipeline_ranks(self.rank))
        self.replicas = View(self.world, self.layout.data_ranks(self.rank))
        self.tensor = self.world.group(self.layout.tensor_ranks(self.rank))
        self.data = self.world.group(self.layout.data_ranks(self.rank))
        self.alarm = Alarm(self.world)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def pipeline_rank(self) -> int:
        return self.layout.place(self.rank).pipeline

    @property
    def pipeline_size(self) -> int:
        return self.layout.pipeline

    @property
    def tensor_rank(self) -> int:
        return self.layout.place(self.rank).tensor

    @property
    def tensor_size(self) -> int:
        return self.layout.tensor

    @property
    def data_rank(self) -> int:
        return self.layout.place(self.rank).data

    @property
    def data_size(self) -> int:
        return self.layout.data

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The layout as torch's libraries want it: dimensions "data", "pipeline", "tensor". Ranks ask together the
        first time. Raises UsageError where torch.distributed was not initialized, as in threads or a world of one.
        """
        if not dist.is_initialized():
            raise UsageError("a device mesh needs torch.distributed: start processes, or call init_process_group first")
        layout = self.layout
        ranks = torch.arange(layout.world_size).view(layout.data, layout.pipeline, layout.tensor)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("data", "pipeline", "tensor"))

    def close(self) -> None:
        """Gives the channels back; `launch` may then be called again. Every rank closes its own."""
        self.world.close()
        if _context.get(None) is self:
            _context.set(None)


_context: ContextVar[Context | None] = ContextVar("pipeflow.context", default=None)


def current_context() -> Context:
    """The context that `launch` set. Raises UsageError when there is none."""
    context = _context.get()
    if context is None:
        raise UsageError("there is no context: call pipeflow.launch(pipeline=...) first")
    return context


def is_launched() -> bool:
    """Whether there is a context."""
    return _context.get() is not None


def set_context(context: Context) -> None:
    """Makes `context` this thread's; for launchers other than `launch`."""
    _context.set(context)
