"""Sums: gradients that are summed or averaged over ranks, in the order in which a step does so. Those of neighbouring
parameters are packed into one tensor, a Bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import groupby
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import like, local_part, settled
from pipeflow.engine.parallel.transport.agreement import finish, start
from pipeflow.engine.parallel.transport.protocol import Group, Tag, Transport, Work
from pipeflow.engine.runtime.gradients.weights import Weight

BUCKET = 2**22  # bytes of gradients that are exchanged at once


class Bucket:
    """Parameters of one dtype and device whose gradients are packed into one row and unpacked from it. After the
    gradients, the row says which parameters have one, so that no gradient and a zero gradient are not confused.
    """

    __slots__ = ("_presence", "device", "dtype", "parameters", "sizes")

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.dtype = gradient_dtype(self.parameters[0])
        self.device = self.parameters[0].device
        self.sizes = [local_part(parameter).numel() for parameter in self.parameters]
        self._presence: tuple[list[float], Tensor] | None = None  # of the last row, and its tensor

    @torch.no_grad()
    def pack(self) -> Tensor:
        """This rank's current gradients as one real-valued row, with zeros where there is none. Raises UsageError for a
        gradient that is neither dense nor has sparse rows.
        """
        rows = [self._row(parameter, size) for parameter, size in zip(self.parameters, self.sizes, strict=True)]
        row = torch.cat([*rows, self._presence_row()])
        return torch.view_as_real(row).flatten() if row.is_complex() else row

    def empty(self) -> Tensor:
        """Memory for a row of another rank."""
        numbers = (sum(self.sizes) + len(self.sizes)) * (2 if self.dtype.is_complex else 1)
        return torch.empty(numbers, dtype=self.dtype.to_real(), device=self.device)

    def leave_out(self, parameters: Container[nn.Parameter]) -> None:
        """Puts parameters without a gradient into the places of `parameters`."""
        for index, size in enumerate(self.sizes):
            if self.parameters[index] in parameters:
                stand_in = torch.empty(size, dtype=self.dtype, device=self.device)
                self.parameters[index] = nn.Parameter(stand_in, requires_grad=False)

    @torch.no_grad()
    def unpack(self, row: Tensor) -> None:
        """Writes the gradients from a row that was summed over ranks. A parameter for which no rank has a gradient
        keeps None.
        """
        row = torch.view_as_complex(row.view(-1, 2)) if self.dtype.is_complex else row
        *parts, there = row.split([*self.sizes, len(self.sizes)])
        missing = any(parameter.grad is None for parameter in self.parameters)
        somewhere = (
            (there.real if there.is_complex() else there).tolist() if missing else self.sizes
        )  # reads from the device only if needed
        for parameter, part, has_one in zip(self.parameters, parts, somewhere, strict=True):
            if parameter.grad is not None:
                _replace(parameter.grad, part)
            elif has_one:
                gradient = part.view(local_part(parameter).shape).clone()
                parameter.grad = gradient.to_sparse(1) if has_one < 0 else like(gradient, parameter)

    def _presence_row(self) -> Tensor:
        """Which parameters have a gradient. Kept from step to step, since the host waits for each copy to a device."""
        there = [_presence(parameter.grad) for parameter in self.parameters]
        if self._presence is None or self._presence[0] != there:
            self._presence = there, torch.tensor(there, dtype=self.dtype, device=self.device)
        return self._presence[1]

    def _row(self, parameter: nn.Parameter, size: int) -> Tensor:
        if parameter.grad is None:
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        parameter.grad = settled(parameter.grad, parameter)
        gradient = local_part(parameter.grad)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is laid out as {gradient.layout}, "
                "which cannot be summed over ranks: make it dense, or sparse as nn.Embedding does"
            )
        return gradient.flatten().to(self.dtype)


def _presence(gradient: Tensor | None) -> float:
    """The entry of a parameter in a row: 0 without a gradient, -1 for a sparse one, else 1."""
    if gradient is None:
        return 0.0
    return -1.0 if gradient.is_sparse else 1.0


def in_buckets(parameters: Iterable[nn.Parameter], size: int = BUCKET) -> Iterator[list[nn.Parameter]]:
    """Groups neighbouring parameters whose gradients have one dtype and device, up to `size` bytes per group."""
    for _, alike in groupby(parameters, key=lambda parameter: (gradient_dtype(parameter), parameter.device)):
        bucket: list[nn.Parameter] = []
        filled = 0
        for parameter in alike:
            filled += parameter.nbytes
            if bucket and filled > size:
                yield bucket
                bucket, filled = [], parameter.nbytes
            bucket.append(parameter)
        yield bucket


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of the parameter's gradient, which may be wider than its own."""
    return parameter.grad_dtype or parameter.dtype


def widen_gradient(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Makes the parameter's gradient accumulate in `dtype` if the parameter's dtype is narrower."""
    if parameter.is_floating_point() and torch.promote_types(parameter.dtype, dtype) is not gradient_dtype(parameter):
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.promote_types(parameter.dtype, dtype)
        parameter.grad = None if gradient is None else gradient.to(parameter.grad_dtype)


def _replace(gradient: Tensor, by: Tensor) -> None:
    """Writes other values into a gradient, which keeps its layout, sparsity and distribution."""
    if gradient.is_sparse:
        gradient.copy_(by.view(gradient.shape).to_sparse(gradient.sparse_dim()))
    else:
        local = local_part(gradient)
        local.copy_(by.view(local.shape))


class BucketSum(ABC):
    """A sum of one bucket of gradients over several ranks, which runs beside the rank's computations.

    Args:
        bucket: the gradients.
        after: stage after whose last weight gradient it begins; None to begin at the end of the step.

    Attributes:
        writing: seconds in which the last sum was written into the gradients.
    """

    __slots__ = ("after", "bucket", "row", "works", "writing")

    def __init__(self, bucket: Bucket, after: int | None) -> None:
        self.bucket = bucket
        self.after = after
        self.row: Tensor | None = None  # this rank's gradients, once it has started
        self.works: list[Work] = []
        self.writing = 0.0

    @abstractmethod
    def start(self) -> None:
        """Starts the sum with the current gradients. Raises LinkError."""

    def result(self, row: Tensor) -> Tensor:
        """The sum, when no transfer is under way any more. `row` is this rank's part, or all of it already."""
        return row

    def finish(self) -> None:
        """Waits for the sum and writes it into the gradients. Raises LinkError."""
        for work in self.works:
            work.wait()
        start = perf_counter()
        if self.row is not None:
            self.bucket.unpack(self.result(self.row))
        self.writing = perf_counter() - start
        self.forget()

    def forget(self) -> None:
        """Releases the packed gradients and their transfers, complete or not."""
        self.row, self.works = None, []


class GroupSum(BucketSum):
    """The sum over a group, or the average if `mean` is True."""

    __slots__ = ("group", "mean")

    def __init__(self, bucket: Bucket, group: Group, after: int | None, *, mean: bool) -> None:
        super().__init__(bucket, after)
        self.group = group
        self.mean = mean

    def start(self) -> None:
        self.row = self.bucket.pack()
        if self.mean:
            self.row /= self.group.size
        self.works.append(self.group.all_reduce(self.row))


class TiedSum(BucketSum):
    """The sum over the pipeline ranks that hold the same weights, added up in rank order."""

    __slots__ = ("arriving", "peers", "queues", "ranks", "transport")

    def __init__(self, bucket: Bucket, transport: Transport, after: int | None, ranks: tuple[int, ...]) -> None:
        super().__init__(bucket, after)
        self.transport = transport
        self.ranks = ranks
        self.peers = [rank for rank in ranks if rank != transport.rank]
        self.queues: dict[int, Sequence[TiedSum]] = dict.fromkeys(self.peers, (self,))
        """Per peer, the sums with it, in the order in which it sends."""
        self.arriving: dict[int, Tensor] = {}

    def start(self) -> None:
        for peer, queue in self.queues.items():
            for each in queue:
                each.post(peer)
        self.row = self.bucket.pack()
        self.works += [_Once(self.transport, peer, self.row, sending=True) for peer in self.peers]

    def post(self, peer: int) -> None:
        """Posts the receive of a peer's copy, unless it is posted already."""
        if peer not in self.arriving:
            self.arriving[peer] = self.bucket.empty()
            self.works.append(_Once(self.transport, peer, self.arriving[peer], sending=False))

    def result(self, row: Tensor) -> Tensor:
        rows = {self.transport.rank: row, **self.arriving}
        total = rows[self.ranks[0]]
        for rank in self.ranks[1:]:
            total += rows[rank]
        return total

    def forget(self) -> None:
        super().forget()
        self.arriving = {}


class _Once:
    """A transfer for which two threads may wait, as in a traced step. A channel between CPUs wakes up only one of them;
    on a GPU, a wait holds up the stream of its thread alone, so each thread must wait.
    """

    __slots__ = ("_done", "_lock", "_on_gpu", "_work")

    def __init__(self, transport: Transport, peer: int, row: Tensor, *, sending: bool) -> None:
        self._work = start(transport, peer, Tag.TIED, row, sending=sending)
        self._done = False
        self._on_gpu = transport.device.type == "cuda"
        self._lock = Lock()

    def wait(self) -> None:
        with self._lock:
            if not self._done:
                finish(self._work, "waiting for the gradient of a tied weight")
                self._done = not self._on_gpu


class Sums:
    """All sums of this rank, in the order in which they end.

    First tied weights are summed over the pipeline ranks that hold them, then partial gradients over the tensor ranks;
    then gradients are averaged over the replicas. Each sum begins as soon as the one before it is complete. Sums are
    made when the weights change, not in a step.

    Attributes:
        parameters: the trainable parameters of `weights` that have memory.
    """

    def __init__(self, weights: Iterable[Weight], context: Context) -> None:
        trained = [weight for weight in weights if weight.parameter.requires_grad and not weight.parameter.is_meta]
        tied = [weight for weight in trained if len(weight.ranks) > 1]
        parts = [weight for weight in trained if weight.is_part and context.tensor.size > 1]
        averaged = [weight for weight in trained if not weight.is_sharded and context.data.size > 1]
        self.parameters = {weight.parameter for weight in trained}
        self._rank = context.pipeline_rank
        self._tied = [
            TiedSum(bucket, context.transport, alike[0].after, alike[0].ranks)
            for alike in _grouped(tied, lambda weight: (weight.after is None, weight.after, weight.ranks))
            for bucket in _buckets(sorted(alike, key=lambda weight: weight.order))
        ]
        self._parts = [GroupSum(bucket, context.tensor, None, mean=False) for bucket in _buckets(parts)]
        self._averages = [
            GroupSum(bucket, context.data, alike[0].averaged_after, mean=True)
            for alike in _grouped(averaged, lambda weight: (weight.averaged_after is None, weight.averaged_after))
            for bucket in _buckets(alike)
        ]
        self._early: list[BucketSum] = [each for each in (*self._tied, *self._averages) if each.after is not None]
        self._added = list(dict.fromkeys(weight.parameter for weight in (*tied, *parts)))
        self._earlier: list[Tensor | None] = []
        self._orders: Orders = ()

    @property
    def summed(self) -> set[nn.Parameter]:
        """The parameters whose gradients are in any sum."""
        return {each for each_sum in self._all for each in each_sum.bucket.parameters}

    @property
    def _all(self) -> list[BucketSum]:
        return [*self._tied, *self._parts, *self._averages]

    def leave_out(self, parameters: set[nn.Parameter]) -> None:
        """Makes the sums go on without these parameters, since they have another dtype, shape or device now. Other
        ranks may not know yet, so the rows keep their lengths.
        """
        for each in self._all:
            each.bucket.leave_out(parameters)
        self.parameters -= parameters
        self._added = [parameter for parameter in self._added if parameter not in parameters]

    def begin(self, orders: Orders) -> None:
        """Call before the first backward of a step, in which ranks reduce their stages in `orders`. Sets gradients of
        earlier steps aside if this step's gradients are summed, because the earlier ones have been summed already.
        """
        if orders is not self._orders:
            self._arrange(orders)
        self._earlier = [parameter.grad for parameter in self._added]
        for parameter in self._added:
            parameter.grad = None

    def start(self, stage: int) -> list[Work]:
        """Starts the sums that can begin when all backwards of `stage` are done. Raises LinkError."""
        started = [each for each in self._early if each.after == stage]
        for each in started:
            each.start()
        return [work for each in started for work in each.works]

    def writing(self, stage: int) -> float:
        """Seconds in which the sums that began after `stage` were written into the gradients when they last ended."""
        return sum(each.writing for each in self._early if each.after == stage)

    def end(self, *, reduce: bool) -> None:
        """Call after the last backward. If `reduce` is False, gradients are not averaged: each replica accumulates its
        own. Raises LinkError.
        """
        _finish(self._tied)
        _finish(self._parts)
        for parameter, earlier in zip(self._added, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []
        if reduce:
            _finish(self._averages)

    def forget(self) -> None:
        """Discards the sums that are not complete, after a failed step."""
        for each in self._all:
            each.forget()
        self._earlier = []

    def _arrange(self, orders: Orders) -> None:
        """Orders the sums so that every rank sends as early as it can, and its peer receives in the same order."""
        self._orders = orders
        for sums in (self._tied, self._averages):
            sums.sort(key=lambda each: _turn(each, orders[self._rank]))
        self._early.sort(key=lambda each: _turn(each, orders[self._rank]))
        pairs = [each for each in self._tied if each.after is not None]
        for peer in {peer for each in pairs for peer in each.peers}:
            queue = sorted((each for each in pairs if peer in each.peers), key=lambda it: _turn(it, orders[peer]))
            for each in queue:
                each.queues[peer] = queue


def _turn(each: BucketSum, order: Sequence[int]) -> int:
    return len(order) if each.after is None else order.index(each.after)


def _finish(sums: Sequence[BucketSum]) -> None:
    """Waits for all `sums`, after starting those that have not started."""
    for each in sums:
        if each.row is None:
            each.start()
    for each in sums:
        each.finish()


def _grouped(weights: Iterable[Weight], key: Callable[[Weight], tuple[Any, ...]]) -> Iterator[list[Weight]]:
    """Yields the weights of each key together, in the order of the keys."""
    for _, alike in groupby(sorted(weights, key=key), key=key):
        yield list(alike)


def _buckets(weights: Iterable[Weight]) -> Iterator[Bucket]:
    return map(Bucket, in_buckets(weight.parameter for weight in weights))


Orders = Sequence[Sequence[int]]
"""For each rank of a pipeline, its stages in the order in which it reduces them."""


def orders_of(schedule: Schedule) -> Orders:
    """The orders in a schedule. Stages for which a rank computes no gradient come last."""
    reducing = schedule.with_reductions()
    return [_order(reducing, rank) for rank in range(schedule.placement.num_ranks)]


def _order(schedule: Schedule, rank: int) -> list[int]:
    reduced = [action.stage for action in schedule.actions(rank) if action.kind is Kind.R]
    return [*reduced, *(stage for stage in schedule.placement.stages_of(rank) if stage not in reduced)]
