"""Sums: gradients that are summed or averaged over ranks, in the order in which a step does so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from threading import Lock
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import finish, start
from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.protocol import Tag, Transport
from pipeflow.parallel.transport.work import Work
from pipeflow.runtime.gradients.bucket import Bucket, in_buckets
from pipeflow.runtime.gradients.orders import Orders
from pipeflow.runtime.gradients.weights import Weight


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

    @abstractmethod
    def result(self, row: Tensor) -> Tensor:
        """The sum, when no transfer is under way any more. `row` is this rank's part."""

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

    def result(self, row: Tensor) -> Tensor:
        return row


class TiedSum(BucketSum):
    """The sum over the pipeline ranks that hold the same weights, added up in rank order."""

    __slots__ = ("arriving", "peers", "queue", "ranks", "transport")

    def __init__(self, bucket: Bucket, transport: Transport, after: int | None, ranks: tuple[int, ...]) -> None:
        super().__init__(bucket, after)
        self.transport = transport
        self.ranks = ranks
        self.peers = [rank for rank in ranks if rank != transport.rank]
        self.queue: Sequence[TiedSum] = (self,)  # sums with the same peers, in the order in which these send
        self.arriving: dict[int, Tensor] = {}

    def start(self) -> None:
        for each in self.queue:
            each.post()
        self.row = self.bucket.pack()
        self.works += [_Once(self.transport, peer, self.row, sending=True) for peer in self.peers]

    def post(self) -> None:
        """Posts the receives of the other copies, unless they are posted already."""
        if not self.arriving:
            self.arriving = {peer: self.bucket.empty() for peer in self.peers}
            self.works += [_Once(self.transport, peer, row, sending=False) for peer, row in self.arriving.items()]

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
        for each in pairs:
            [peer] = each.peers
            queue = sorted((other for other in pairs if other.peers == [peer]), key=lambda it: _turn(it, orders[peer]))
            each.queue = queue


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
