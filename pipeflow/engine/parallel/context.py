"""Context: this process's place among the others. It is the only global state of the package, comparable to torch's
default process group; other packages store their state per rank here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from pipeflow.engine.parallel.failure import Alarm
from pipeflow.engine.parallel.grid import GridGroups
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.protocol import Group, Subset, Transport
from pipeflow.engine.parallel.turns import Turns

CONTEXT_ATTENTION = ("gather", "ring", "all_to_all")
"""How attention over context ranks gets keys and values: of all ranks at once, or of one rank at a time."""


@dataclass(eq=False)
class Context:
    """The place of this process in the world, and its connections to other ranks.

    Attributes:
        rank: rank in the world.
        layout: the sizes of the world's dimensions (data, pipeline, depth, context, tensor), and the number of expert
            ranks.
        device: the device on which this process computes.
        world: the transport that connects all ranks.
        whole: the one that connected all ranks at the launch.
        context_attention: how attention over context ranks gets keys and values, one of `CONTEXT_ATTENTION`.
        adaptive: whether Pipelines change the order of their steps when these take other times.
        elastic: whether the ranks that are left go on when others die. Then they form one pipeline, in which several
            ranks hold each stage: `rank`, `layout`, all transports and groups are those of that pipeline. `data_rank`
            and `data_size` stay those of the batches that a rank reads.
        launched: the layout at the launch.
        living: the ranks at the launch that are left, by their rank now.
        transport: the transport that connects the ranks of this rank's pipeline.
        replicas: the transport that connects the ranks that have the same place in other replicas.
        holders: the transport that connects the ranks that hold the same weights, in all replicas and context ranks.
        losses: the transport that connects the ranks whose losses make up that of the whole batch: the `holders`, and
            in a grid of tensor ranks those with other samples.
        tensor: the group of ranks that hold the other parts of the same layers.
        grid: the groups of this rank in a grid of tensor ranks; None in tensor mode "1d".
        context: the group of ranks that hold the same weights and the other tokens of the same sequences.
        depth: the group of ranks that hold the same weights and other samples of the same batches, as in mode "2.5d".
        data: the same ranks as `replicas`, as a group.
        copies: the same ranks as `holders`, as a group, replica by replica.
        peers: the ranks that hold the same stages: the `copies`, or those of them that are left.
        experts: the group of replicas among which the experts of a layer are divided.
        expert_copies: those of `copies` that hold the same experts, as a group.
        turns: the turns of the two halves of a pair that runs.
        alarm: reports a failure on one rank to all ranks.
        world_size: number of ranks in the world.
        pipeline_rank, tensor_rank, data_rank, context_rank: indices of this rank along the dimensions of the layout.
        pipeline_size, tensor_size, data_size, context_size: sizes of these dimensions.
    """

    rank: int
    layout: WorldLayout
    device: torch.device
    world: Transport
    context_attention: str = "gather"
    adaptive: bool = False
    elastic: bool = False
    whole: Transport = field(init=False)
    launched: WorldLayout = field(init=False)
    living: tuple[int, ...] = field(init=False)
    transport: Transport = field(init=False)
    replicas: Transport = field(init=False)
    holders: Transport = field(init=False)
    losses: Transport = field(init=False)
    grid: GridGroups | None = field(init=False)
    tensor: Group = field(init=False)
    context: Group = field(init=False)
    depth: Group = field(init=False)
    data: Group = field(init=False)
    copies: Group = field(init=False)
    peers: Group = field(init=False)
    experts: Group = field(init=False)
    expert_copies: Group = field(init=False)
    turns: Turns = field(init=False, default_factory=Turns)
    alarm: Alarm = field(init=False)
    world_size: int = field(init=False)
    pipeline_rank: int = field(init=False)
    tensor_rank: int = field(init=False)
    data_rank: int = field(init=False)
    context_rank: int = field(init=False)
    pipeline_size: int = field(init=False)
    tensor_size: int = field(init=False)
    data_size: int = field(init=False)
    context_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.whole, self.launched, self.living = self.world, self.layout, tuple(range(self.world.size))
        self._find_place()
        self.peers = self.copies
        self.alarm = Alarm(self.world)
        if self.elastic:
            self.alarm.survive = self.survive

    def survive(self, living: tuple[int, ...]) -> None:
        """Makes this the context of one pipeline of the ranks `living`, as they were at the launch. Raises UsageError
        if none of them holds some stages, or reads the batches of a replica.
        """
        places = [self.launched.place(rank) for rank in living]
        if lost := set(range(self.launched.pipeline)) - {place.pipeline for place in places}:
            raise UsageError(
                f"no rank is left that holds the stages of pipeline rank {min(lost)}: start again from the newest "
                f"checkpoint, on {len(living)} ranks or more"
            )
        if lost := set(range(self.launched.data)) - {place.data for place in places}:
            raise UsageError(
                f"no rank is left of replica {min(lost)}, so nobody reads its batches: start again from the newest "
                "checkpoint"
            )
        own = self.living[self.rank]
        self.living, self.rank, self.layout = living, living.index(own), WorldLayout(pipeline=len(living))
        self.world = Subset(self.whole, living)
        self._find_place()
        self.data_rank, self.data_size = places[self.rank].data, self.launched.data
        self.peers = self.world.group(self.holding([places[self.rank].pipeline]))

    def holding(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The pipeline ranks that hold what these pipeline ranks held at the launch: themselves, unless some died."""
        if len(self.living) == self.launched.world_size:
            return tuple(ranks)
        held = set(ranks)
        return tuple(now for now, rank in enumerate(self.living) if self.launched.place(rank).pipeline in held)

    @property
    def readers(self) -> list[int]:
        """A rank of each replica, its first, which has read the replica's batch."""
        replicas = [self.launched.place(rank).data for rank in self.living]
        return [replicas.index(replica) for replica in range(self.launched.data)]

    @property
    def is_joined(self) -> bool:
        """Whether ranks have died, so that one pipeline computes the batches of all replicas."""
        return len(self.living) < self.launched.world_size

    def _find_place(self) -> None:
        layout = self.layout
        self.data_rank, self.pipeline_rank, self.tensor_rank, self.context_rank, _ = layout.place(self.rank)
        self.data_size, self.pipeline_size, self.tensor_size = layout.data, layout.pipeline, layout.tensor
        self.context_size, self.world_size = layout.context, layout.world_size
        self.transport = Subset(self.world, layout.pipeline_ranks(self.rank))
        self.replicas = Subset(self.world, layout.data_ranks(self.rank))
        self.holders = Subset(self.world, layout.copy_ranks(self.rank))
        self.losses = Subset(self.world, layout.loss_ranks(self.rank))
        groups: dict[tuple[int, ...], Group] = {}  # two groups of the same ranks would share their communicator

        def group(ranks: tuple[int, ...]) -> Group:
            return groups.get(ranks) or groups.setdefault(ranks, self.world.group(ranks))

        tensor_ranks = layout.tensor_ranks(self.rank)
        self.tensor = self.world.group(tensor_ranks)
        self.grid = None if layout.grid is None else GridGroups.of(layout.grid, self.world, tensor_ranks)
        self.context = group(layout.context_ranks(self.rank))
        self.depth = group(layout.depth_ranks(self.rank))
        self.data = group(layout.data_ranks(self.rank))
        self.copies = group(layout.copy_ranks(self.rank))
        self.experts = group(layout.expert_ranks(self.rank))
        self.expert_copies = group(layout.expert_copy_ranks(self.rank))

    @property
    def has_part(self) -> bool:
        """True if this rank has only a part of the model: its stages, parts of layers, or some of the experts."""
        return self.pipeline_size * self.tensor_size * self.experts.size > 1

    def connect_grid(self) -> None:
        """Connects the groups of the grid, and of the layers of depth. All ranks of a replica call it together."""
        for group in (*(() if self.grid is None else self.grid.along), self.depth):
            group.connect()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The layout as a `DeviceMesh` for torch's libraries, with dimensions "data", "pipeline" and "tensor". With
        context ranks it also has "context", before "tensor"; in tensor mode "2.5d" it has "depth" there.

        All ranks must read it together the first time. Raises UsageError if torch.distributed is not initialized: when
        ranks are threads, or in a world of one process without torchrun.
        """
        if not dist.is_initialized():
            raise UsageError("a device mesh needs torch.distributed: start processes, or call init_process_group first")
        sizes = {"data": self.data_size, "pipeline": self.pipeline_size}
        others = {"depth": self.layout.depth, "context": self.context_size}
        sizes |= {name: size for name, size in others.items() if size > 1}
        sizes["tensor"] = self.tensor_size
        ranks = torch.arange(self.world_size, device="cpu").view(*sizes.values())
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=tuple(sizes))

    def close(self) -> None:
        """Closes the connections of this rank; `launch` may then be called again. Each rank closes its own."""
        self.whole.close()
        _SCOPES.drop(self)


@dataclass(eq=False)
class _Scope:
    """The state that a thread sees: its context, and the values stored with it."""

    context: Context | None = None
    kept: dict[str, Any] = field(default_factory=dict)


class _Scopes:
    """The scope of the process, used by every thread that has no scope of its own."""

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
    """The context of this process, or of this thread if ranks are threads. Raises UsageError if there is none."""
    context = context_if_launched()
    if context is None:
        raise UsageError("there is no context: call pipeflow.launch(pipeline=...) first")
    return context


def context_if_launched() -> Context | None:
    """Like `current_context`, but None if nothing was launched: this process is then a world of one.

    Raises UsageError on a thread without a context while other threads have one.
    """
    context = _SCOPES.current().context
    if context is None and _SCOPES.open:
        raise UsageError(
            "this thread has no context: the ranks of this process are threads, and this thread is not one of them. On "
            "a rank's thread, wrap the function to run here: pipeflow.engine.parallel.context.in_this_context(function)"
        )
    return context


def is_launched() -> bool:
    """Returns True if this thread has a context."""
    return _SCOPES.current().context is not None


def set_context(context: Context) -> None:
    """Sets the context of this thread. For launchers whose ranks are threads."""
    _SCOPES.open.add(context)
    _SCOPES.of_thread.set(_Scope(context))


def set_process_context(context: Context) -> None:
    """Sets the context of every thread that has none of its own."""
    _SCOPES.open.add(context)
    _SCOPES.process = _Scope(context)


P = ParamSpec("P")
R = TypeVar("R")


def in_this_context(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps `function` so that it runs with the caller's context on any thread. Only needed if ranks are threads."""
    scope = _SCOPES.current()

    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        with _inside(scope):
            return function(*arguments, **keywords)

    return run


def kept(key: str) -> Any:
    """The value that `keep` stored under `key` for this rank, or None. Before any launch, values belong to the process.

    Raises UsageError on a thread that is not a rank, like `current_context`.
    """
    return _kept().get(key)


def keep(key: str, value: object) -> None:
    """Stores `value` under `key` for all threads of this rank, until the context is closed. Raises UsageError like
    `kept`.
    """
    _kept()[key] = value


def keeping(key: str, make: Callable[[], object]) -> AbstractContextManager[None]:
    """Returns a context manager for any thread: inside it, that thread alone belongs to this rank and finds `make()`
    under `key`.
    """
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
