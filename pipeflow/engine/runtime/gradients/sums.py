"""Sums: gradients that are summed or averaged over ranks, in the order in which a step does so, those of neighbouring
parameters together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import groupby
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import like, local_part, settled
from pipeflow.engine.parallel.transport.agreement import finish, start
from pipeflow.engine.parallel.transport.protocol import Group, Tag, Transport, Work
from pipeflow.engine.runtime.gradients.weights import Bucket, Owners, Weight, gradient_dtype, in_buckets


class BucketSum(ABC):
    """A sum over several ranks of the gradients of one bucket, which are of one dtype and device. It runs beside the
    rank's computations.

    When it starts, gradients move into one row of memory, of which their `.grad` are parts from then on, so that what
    is summed in the row is summed in them. Gradients that cannot lie in a row, such as sparse ones and those in another
    memory format, are copied into it, and the sum is copied back. After the gradients, the row says which parameters
    have one, so that no gradient and a zero gradient are not confused.

    Args:
        parameters: the parameters.
        after: stage after whose last weight gradient it begins; None to begin at the end of the step.
    """

    def __init__(self, parameters: Bucket, after: int | None) -> None:
        self.parameters = parameters
        self.after = after
        self.is_elsewhere = False  # another replica gets the sum
        self.row: Tensor | None = None  # once it has started
        self.works: list[Work] = []
        self._dtype = gradient_dtype(self.parameters[0])
        self._device = self.parameters[0].device
        self._sizes = [local_part(parameter).numel() for parameter in self.parameters]
        self._views: Sequence[Tensor | None] = ()  # the parts of the row
        self._last: tuple[TensorWeakRef | None, list[int]] = None, []  # first part of the last row, addresses of all
        self._last_presence: tuple[list[float], Tensor] | None = None  # of the last row, and its tensor

    @abstractmethod
    def start(self) -> None:
        """Starts the sum with the current gradients. Raises LinkError, and UsageError for a gradient that is neither
        dense nor has sparse rows.
        """

    def result(self, row: Tensor) -> Tensor:
        """The sum, when no transfer is under way any more. `row` is this rank's part, or all of it already."""
        return row

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the sum and makes it the gradients. A parameter for which no rank has a gradient keeps None. Raises
        LinkError.
        """
        for work in self.works:
            work.wait()
        if self.row is not None and not self.is_elsewhere:
            if (total := self.result(self.row)) is not self.row:
                self.row.copy_(total)
            missing = any(parameter.grad is None for parameter in self.parameters)
            there = torch.real(self.row[-len(self._sizes) :])
            somewhere = there.tolist() if missing else self._sizes  # reads from the device only if needed
            for entry in zip(self.parameters, self._views, somewhere, strict=True):
                _write(*entry)
        elif self.row is not None:
            for parameter in self.parameters:
                parameter.grad = None
        self.forget()

    def forget(self) -> None:
        """Leaves the row to its gradients, and releases its transfers, complete or not."""
        self.row, self.works, self._views = None, [], ()

    def empty(self) -> Tensor:
        """Memory for a row."""
        return torch.zeros(sum(self._sizes) + len(self._sizes), dtype=self._dtype, device=self._device)

    def leave_out(self, parameters: Container[nn.Parameter]) -> None:
        """Puts parameters without a gradient into the places of `parameters`."""
        for index, size in enumerate(self._sizes):
            if self.parameters[index] in parameters:
                stand_in = torch.empty(size, dtype=self._dtype, device=self._device)
                self.parameters[index] = nn.Parameter(stand_in, requires_grad=False)

    @torch.no_grad()
    def pack(self) -> Tensor:
        """The row of this rank's gradients: the last one if all are still there, or a new one, into which they move."""
        gradients = [parameter.grad for parameter in self.parameters]
        (first, addresses), old = self._last, gradients[0]
        alike = zip(gradients, addresses, strict=True) if first is not None and first() is old else None
        if (
            old is not None
            and alike
            and all(each is not None and each.data_ptr() == at and each.is_contiguous() for each, at in alike)
        ):
            self.row, self._views = old.as_strided((sum(self._sizes) + len(gradients),), (1,), 0), gradients
        else:
            self.row = self._move()
        self.row[-len(gradients) :] = self._which(gradients)
        return self.row

    def _move(self) -> Tensor:
        """Moves gradients into a new row."""
        row = self.empty()
        parts = zip(row[: -len(self._sizes)].split(self._sizes), self.parameters, strict=True)
        self._views = views = [part.view(local_part(parameter).shape).data for part, parameter in parts]  # own versions
        self._last = TensorWeakRef(views[0]), [view.data_ptr() for view in views]
        for parameter, view in zip(self.parameters, views, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad = settled(parameter.grad, parameter)
                local = local_part(gradient)
                local = local.to_dense() if local.is_sparse else local
                if local.layout is not torch.strided:
                    raise UsageError(
                        f"the gradient of a parameter of shape {tuple(gradient.shape)} is laid out as {local.layout}, "
                        "which cannot be summed over ranks: make it dense, or sparse as nn.Embedding does"
                    )
                view.copy_(local)
                if type(gradient) is type(view) and gradient.is_contiguous() and gradient.dtype is self._dtype:
                    parameter.grad = view
        return row

    def _which(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Which parameters have a gradient: 0 without one, -1 for a sparse one, else 1. Kept from step to step, since
        the host waits for each copy to a device.
        """
        there = [0.0 if each is None else -1.0 if each.is_sparse else 1.0 for each in gradients]
        if self._last_presence is None or self._last_presence[0] != there:
            self._last_presence = there, torch.tensor(there, dtype=self._dtype, device=self._device)
        return self._last_presence[1]


def _real(row: Tensor) -> Tensor:
    return torch.view_as_real(row).view(-1) if row.is_complex() else row


def _write(parameter: nn.Parameter, total: Tensor | None, somewhere: float) -> None:
    """Makes a sum the gradient, which keeps its layout, sparsity and distribution. Other ranks may have one alone."""
    gradient = parameter.grad
    if total is None or gradient is total:
        return
    if gradient is None:
        parameter.grad = total.to_sparse(1) if somewhere < 0 else like(total, parameter) if somewhere else None
    elif gradient.is_sparse:
        gradient.copy_(total.view(gradient.shape).to_sparse(gradient.sparse_dim()))
    else:
        local_part(gradient).copy_(total)


def widen_gradient(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Makes the parameter's gradient accumulate in `dtype` if the parameter's dtype is narrower."""
    if parameter.is_floating_point() and torch.promote_types(parameter.dtype, dtype) is not gradient_dtype(parameter):
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.promote_types(parameter.dtype, dtype)
        parameter.grad = None if gradient is None else gradient.to(parameter.grad_dtype)


class GroupSum(BucketSum):
    """The sum over a group, or the average if `mean` is True. If it has an `owner`, others' gradients become None."""

    def __init__(self, bucket: Bucket, group: Group, after: int | None, owner: int | None, mean: bool) -> None:
        super().__init__(bucket, after)
        self.group, self.mean, self.owner = group, mean, owner
        self.is_elsewhere = owner not in (None, group.rank)

    def start(self) -> None:
        row = _real(self.pack())
        if self.mean:
            row /= self.group.size
        self.works.append(self.group.all_reduce(row) if self.owner is None else self.group.reduce(row, self.owner))


class TiedSum(BucketSum):
    """The sum over the pipeline ranks that hold the same weights, added up in rank order."""

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
        row = _real(self.pack())
        self.works += [_Once(self.transport, peer, row, sending=True) for peer in self.peers]

    def post(self, peer: int) -> None:
        """Posts the receive of a peer's copy, unless it is posted already."""
        if peer not in self.arriving:
            self.arriving[peer] = self.empty()
            self.works.append(_Once(self.transport, peer, _real(self.arriving[peer]), sending=False))

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
    then gradients are averaged over the ranks that hold the same weights. Each sum begins as soon as the one before it
    is complete. Sums are made when the weights change, not in a step.

    Attributes:
        parameters: the trainable parameters of `weights` that have memory.
    """

    def __init__(self, weights: Iterable[Weight], context: Context, owners: Owners) -> None:
        trained = [weight for weight in weights if weight.parameter.requires_grad and not weight.parameter.is_meta]
        tied = [weight for weight in trained if len(weight.ranks) > 1]
        parts = [weight for weight in trained if weight.is_part and context.tensor.size > 1]
        holders = {False: context.copies, True: context.expert_copies}  # of a weight, and of one of experts
        averaged = [each for each in trained if not each.is_sharded and holders[each.is_expert].size > 1]
        self.parameters = {weight.parameter for weight in trained}
        self._rank = context.pipeline_rank
        self._tied = [
            TiedSum(bucket, context.transport, alike[0].after, alike[0].ranks)
            for alike in _grouped(tied, lambda weight: (weight.after is None, weight.after, weight.ranks))
            for bucket in in_buckets(weight.parameter for weight in sorted(alike, key=lambda weight: weight.order))
        ]
        self._parts = [
            GroupSum(bucket, context.tensor, None, None, mean=False)
            for bucket in in_buckets(weight.parameter for weight in parts)
        ]
        self._averages = [
            GroupSum(bucket, holders[alike[0].is_expert], alike[0].averaged_after, owners.of.get(bucket[0]), mean=True)
            for alike in _grouped(averaged, lambda it: (it.averaged_after is None, it.averaged_after, it.is_expert))
            for bucket in owners.buckets(weight.parameter for weight in alike)
        ]
        self._owners = owners
        self._early: list[BucketSum] = [each for each in (*self._tied, *self._averages) if each.after is not None]
        self._added = list(dict.fromkeys(weight.parameter for weight in (*tied, *parts)))
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._averaged: dict[nn.Parameter, Tensor] = {}
        self._orders: Orders = ()

    @property
    def summed(self) -> set[nn.Parameter]:
        """The parameters whose gradients are in any sum."""
        return {each for each_sum in self._all for each in each_sum.parameters}

    @property
    def _all(self) -> list[BucketSum]:
        return [*self._tied, *self._parts, *self._averages]

    def leave_out(self, parameters: set[nn.Parameter]) -> None:
        """Makes the sums go on without these parameters, since they have another dtype, shape or device now. Other
        ranks may not know yet, so the rows keep their lengths.
        """
        for each in self._all:
            each.leave_out(parameters)
        self.parameters -= parameters
        self._added = [parameter for parameter in self._added if parameter not in parameters]

    def begin(self, orders: Orders) -> None:
        """Call before the first backward of a step, in which ranks reduce their stages in `orders`. Sets gradients of
        earlier steps aside if this step's gradients are summed, because the earlier ones have been summed already; and
        averages of earlier steps that their owner alone has. Raises UsageError for gradients beside such averages.
        """
        if orders is not self._orders:
            self._arrange(orders)
        self._averaged = self._owners.averages(self.parameters)
        self._earlier = {p: p.grad for p in self._added if p.grad is not None and p not in self._averaged}
        for parameter in (*self._averaged, *self._earlier):
            parameter.grad = None

    def keep_aside(self, parameter: nn.Parameter, own: Tensor) -> None:
        """Moves the parameter's gradient of earlier steps, if it lies in `own`, which this step writes."""
        for aside in (self._earlier, self._averaged):
            if parameter in aside and aside[parameter].data_ptr() == own.data_ptr():
                aside[parameter] = own.clone()

    def start(self, stage: int) -> list[Work]:
        """Starts the sums that can begin when all backwards of `stage` are done. Raises LinkError."""
        started = [each for each in self._early if each.after == stage]
        for each in started:
            each.start()
        return [work for each in started for work in each.works]

    def end(self, *, reduce: bool) -> None:
        """Call after the last backward. If `reduce` is False, gradients are not averaged: each replica accumulates its
        own. Raises LinkError.
        """
        _finish(self._tied)
        _finish(self._parts)
        _add_back(self._earlier)
        if reduce:
            _finish(self._averages)
        else:
            for parameter, average in self._averaged.items():  # which counts once for each replica later
                average.mul_(self._owners.group_of(parameter).size)
        _add_back(self._averaged)
        self._owners.are_averaged = reduce

    def forget(self) -> None:
        """Discards the sums that are not complete, after a failed step."""
        for each in self._all:
            each.forget()
        self._earlier, self._averaged = {}, {}

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


def _add_back(earlier: dict[nn.Parameter, Tensor]) -> None:
    """Adds gradients to those that were set aside."""
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
    earlier.clear()


def _grouped(weights: Iterable[Weight], key: Callable[[Weight], tuple[Any, ...]]) -> Iterator[list[Weight]]:
    """Yields the weights of each key together, in the order of the keys."""
    for _, alike in groupby(sorted(weights, key=key), key=key):
        yield list(alike)


Orders = Sequence[Sequence[int]]
"""For each rank of a pipeline, its stages in the order in which it reduces them."""


def orders_of(schedule: Schedule) -> Orders:
    """The orders in a schedule as it runs. Stages for which a rank computes no gradient come last."""
    reducing, placement = schedule.with_reductions(), schedule.placement
    reduced = [
        [action.stage for action in reducing.actions(rank) if action.kind is Kind.R]
        for rank in range(placement.num_ranks)
    ]
    return [[*dict.fromkeys([*stages, *placement.stages_of(rank)])] for rank, stages in enumerate(reduced)]
