"""Context: this process's place among the others. The one state that the package keeps, as torch keeps its default
process group: what floors above keep per rank hangs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeflow.core.errors import UsageError
from pipeflow.parallel.failure import Alarm
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.parallel.transport.subset import Subset


@dataclass(eq=False)
class Context:
    """This process's place, and what connects it to the others.

    Attributes:
        rank: in the world.
        layout: how the world's ranks are laid out.
        device: where this process computes.
        world: the transport of all ranks.
        transport: that of this rank's pipeline.
        tensor: the group that holds the other parts of the same layers.
        data: the group that holds the same weights for other data.
        alarm: tells every rank of a failure on one.
    """

    rank: int
    layout: Layout
    device: torch.device
    world: Transport
    transport: Transport = field(init=False)
    tensor: Group = field(init=False)
    data: Group = field(init=False)
    alarm: Alarm = field(init=False)

    def __post_init__(self) -> None:
        self.transport = Subset(self.world, self.layout.pipeline_ranks(self.rank))
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
        first time. Raises UsageError where torch.distributed was not initialized, as in threads, or in a
        world of one without torchrun.
        """
        if not dist.is_initialized():
            raise UsageError("a device mesh needs torch.distributed: start processes, or call init_process_group first")
        layout = self.layout
        ranks = torch.arange(layout.world_size, device="cpu").view(layout.data, layout.pipeline, layout.tensor)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("data", "pipeline", "tensor"))

    def close(self) -> None:
        """Gives the channels back; `launch` may then be called again. Every rank closes its own."""
        self.world.close()
        _SCOPES.drop(self)


@dataclass(eq=False)
class _Scope:
    """What a thread sees: its context, and what is kept beside it."""

    context: Context | None = None
    kept: dict[str, Any] = field(default_factory=dict)


class _Scopes:
    """The process's scope, which every thread sees that has none of its own."""

    def __init__(self) -> None:
        self.process = _Scope()
        self.of_thread: ContextVar[_Scope | None] = ContextVar("pipeflow", default=None)
        self.open: WeakSet[Context] = WeakSet()

    def current(self) -> _Scope:
        return self.of_thread.get() or self.process

    def drop(self, context: Context) -> None:
        self.open.discard(context)
        if self.process.context is context:
            self.process = _Scope()
        own = self.of_thread.get()
        if own is not None and own.context is context:
            self.of_thread.set(None)


_SCOPES = _Scopes()


def current_context() -> Context:
    """The context of this process, or of this thread where each rank is a thread. Raises UsageError when there is
    none.
    """
    context = context_if_launched()
    if context is None:
        raise UsageError("there is no context: call pipeflow.launch(pipeline=...) first")
    return context


def context_if_launched() -> Context | None:
    """Like `current_context`, but None where nothing was launched: then this process is a world of one. Raises
    UsageError on a thread without a context while others have one.
    """
    context = _SCOPES.current().context
    if context is None and _SCOPES.open:
        raise UsageError(
            "this thread has no context: the ranks of this process are threads, and this is none of them. On a rank's "
            "thread, wrap what this one runs: pipeflow.parallel.context.in_this_context(function)"
        )
    return context


def is_launched() -> bool:
    """Whether this thread has a context."""
    return _SCOPES.current().context is not None


def set_context(context: Context) -> None:
    """Makes `context` this thread's; for launchers whose ranks are threads."""
    _SCOPES.open.add(context)
    _SCOPES.of_thread.set(_Scope(context))


def set_process_context(context: Context) -> None:
    """Makes `context` the one of every thread that has none of its own."""
    _SCOPES.open.add(context)
    _SCOPES.process = _Scope(context)


P = ParamSpec("P")
R = TypeVar("R")


def in_this_context(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run with the caller's context on whichever thread calls it. Only needed where ranks are threads."""
    scope = _SCOPES.current()

    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        with _inside(scope):
            return function(*arguments, **keywords)

    return run


def kept(key: str) -> Any:
    """What `keep` kept under `key` for this rank, or None. Before any launch, for the process. Raises UsageError as
    `current_context` does on a thread that is no rank.
    """
    return _kept().get(key)


def keep(key: str, value: object) -> None:
    """Keeps `value` as long as the context lives, for every thread of this rank. Raises UsageError like `kept`."""
    _kept()[key] = value


def keeping(key: str, make: Callable[[], object]) -> AbstractContextManager[None]:
    """Inside, on whichever thread it is entered, that thread alone is of this rank and finds `make()` under `key`."""
    context, others = _SCOPES.current().context, _kept()

    @contextmanager
    def enter() -> Iterator[None]:
        with _inside(_Scope(context, {**others, key: make()})):
            yield

    return enter()


@contextmanager
def _inside(scope: _Scope) -> Iterator[None]:
    token = _SCOPES.of_thread.set(scope)
    try:
        yield
    finally:
        _SCOPES.of_thread.reset(token)


def _kept() -> dict[str, Any]:
    context_if_launched()
    return _SCOPES.current().kept
