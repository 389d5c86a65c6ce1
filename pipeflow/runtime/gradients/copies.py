"""Copies: the stages that a bidirectional schedule has on this rank and on another. Their gradients are exchanged
beside the computations, from where the plan has their reductions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor, nn

from pipeflow.core.action import Kind
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.parallel.transport.agreement import finish, start
from pipeflow.parallel.transport.protocol import Lane, Transport
from pipeflow.parallel.transport.work import Work
from pipeflow.runtime.gradients.sums import Summand, in_buckets


class Copies:
    """The sums over pairs of copies that are under way on this rank.

    Args:
        held: per stage that another rank has a copy of, the parameters to sum.
        placement: of the pipeline, which says where the other copies are.
        transport: of the pipeline.
    """

    def __init__(self, held: Mapping[int, Sequence[nn.Parameter]], placement: Placement, transport: Transport) -> None:
        self._transport = transport
        self._orders: Orders = ()
        self._copies = {stage: _Copy.of(p for p in held[stage] if p.requires_grad) for stage in held}
        self._posts: dict[int, list[int]] = {}  # per peer, the stages in the order in which it sends them
        for stage, copy in self._copies.items():
            [copy.peer] = [rank for rank in placement.ranks_of(stage) if rank != transport.rank]
            self._posts.setdefault(copy.peer, []).append(stage)

    def begin(self, orders: Orders) -> None:
        """Before the first backward of a step, whose ranks reduce their stages in `orders`."""
        if orders is not self._orders:
            self._orders = orders
            self._copies = {
                stage: self._copies[stage] for stage in orders[self._transport.rank] if stage in self._copies
            }
            for peer, stages in self._posts.items():
                stages.sort(key=orders[peer].index)
        for copy in self._copies.values():
            for bucket in copy.buckets:
                for summand in bucket:
                    summand.begin()

    def start(self, stage: int) -> list[Work]:
        """Starts to exchange the gradients of a stage of which all backwards are done. Raises LinkError."""
        if stage not in self._copies:
            return []
        copy = self._copies[stage]
        for each in self._posts[copy.peer]:
            self._copies[each].post(self._transport)
        copy.send(self._transport)
        return copy.works

    def end(self) -> None:
        """Waits for all of them, those that nobody started included, and sums. Raises LinkError."""
        for stage, copy in self._copies.items():  # in the order that the peers count on
            if not copy.sent:
                self.start(stage)
        for copy in self._copies.values():
            copy.end(self._transport)

    def forget(self) -> None:
        """Drops what is under way."""
        for copy in self._copies.values():
            copy.clear()


Orders = Sequence[Sequence[int]]
"""Per rank of a pipeline, its stages in the order in which it reduces them."""


def orders_of(schedule: Schedule) -> Orders:
    """The orders that a schedule has; on each rank the stages of which it has no gradient come last."""
    reducing = schedule.with_reductions()
    return [_order(reducing, rank) for rank in range(schedule.placement.num_ranks)]


def _order(schedule: Schedule, rank: int) -> list[int]:
    reduced = [action.stage for action in schedule.actions(rank) if action.kind is Kind.R]
    return [*reduced, *(stage for stage in schedule.placement.stages_of(rank) if stage not in reduced)]


class _Once:
    """A transfer that two threads may wait for, as when a step is traced: a channel tells one of them only."""

    __slots__ = ("_done", "_lock", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._done = False
        self._lock = Lock()

    def wait(self) -> None:
        with self._lock:
            if not self._done:
                self._work.wait()
                self._done = True


@dataclass(slots=True)
class _Copy:
    """One stage: what is sent to its other copy and what arrives from there, in buckets."""

    buckets: list[list[Summand]]
    peer: int = 0
    sent: list[Tensor] = field(default_factory=list)
    arriving: list[Tensor] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> _Copy:
        return cls([[Summand(parameter) for parameter in bucket] for bucket in in_buckets(parameters)])

    def post(self, transport: Transport) -> None:
        if not self.arriving:
            for bucket in self.buckets:
                first, size = bucket[0].parameter, sum(summand.parameter.numel() for summand in bucket)
                tensor = torch.empty(size, dtype=first.dtype, device=first.device)
                self.arriving.append(tensor)
                self.works.append(_Once(start(transport, self.peer, Lane.TIED, tensor, sending=False)))

    def send(self, transport: Transport) -> None:
        for bucket in self.buckets:
            tensor = torch.cat([summand.gradient() for summand in bucket])
            self.sent.append(tensor)
            self.works.append(_Once(start(transport, self.peer, Lane.TIED, tensor, sending=True)))

    def end(self, transport: Transport) -> None:
        for work in self.works:
            finish(work, transport.world_rank(self.peer), "waiting for the gradient of a stage's other copy")
        for bucket, mine, its in zip(self.buckets, self.sent, self.arriving, strict=True):
            total = mine.add_(its) if transport.rank < self.peer else its.add_(mine)
            sizes = [summand.parameter.numel() for summand in bucket]
            for summand, part in zip(bucket, total.split(sizes), strict=True):
                summand.end(part)
        self.clear()

    def clear(self) -> None:
        self.sent, self.arriving, self.works = [], [], []
