"""Group: the interface for collectives; the group of one rank; and a group that exchanges nothing."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeflow.parallel.transport.work import Work


class Group(Protocol):
    """Ranks that compute collectives together, counted from 0 within the group.

    All of them make the same calls in the same order. Each call starts at once and is done when its Work is. Tensors
    are contiguous and have the same shape and dtype on every rank. A wait raises LinkError if a rank is lost or time is
    up.
    """

    rank: int
    size: int

    def connect(self) -> None:
        """Connects the ranks, which all call this together; otherwise the first collective connects them. Call it after
        `Transport.connect`, and for several groups in the same order on all ranks. Raises LinkError.
        """

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replaces `tensor` by the sum over the ranks, the same bits on each."""

    def all_reduce_max(self, tensor: Tensor) -> Work:
        """Replaces `tensor` by the elementwise maximum over the ranks."""

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        """Fills `whole` with every rank's `part`, one after the other along dim 0."""

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        """Fills `part` with this rank's piece, along dim 0, of the sum of every rank's `whole`."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Fills `tensor` with the tensor of rank `source`."""


class Done:
    """Work that is already done, as in a group of one rank."""

    def wait(self) -> None:
        """Returns at once, because the work is complete."""


_DONE = Done()


class Alone:
    """The group of one rank, which exchanges nothing."""

    rank = 0
    size = 1

    def connect(self) -> None:
        """Does nothing, because a single rank needs no connection."""

    def all_reduce(self, tensor: Tensor) -> Work:
        return _DONE

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return _DONE

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        whole.copy_(part)
        return _DONE

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        part.copy_(whole)
        return _DONE

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _DONE


class Unconnected(Alone):
    """One rank of a group that exchanges nothing, for forwards on tensors that have shapes but no values."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        return _DONE

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        return _DONE
