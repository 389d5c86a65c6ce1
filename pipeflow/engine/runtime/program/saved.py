"""Saved: the tensors that one forward saved for its backward, caught by autograd's hooks whatever the module is. They
can be dropped and computed again, or moved to the host and back. Must not contain: when that happens.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeflow.core.errors import UsageError
from pipeflow.engine.torch_private.tensors import storage_key

# Theory of operation
#
# torch calls `pack` for each tensor that an operator saves for its backward, keeps what `pack` returns in the graph,
# and calls `unpack` on it in the backward. Here the graph gets a `Holder`, and the tensor is held by the holder alone,
# so its memory can be freed while the graph lives. No module has to know of this.
#
# To recompute, the first forward saves empty holders. The second forward saves the same tensors in the same order,
# since it does the same; the n-th tensor goes into the n-th holder, and the second graph is thrown away. torch's own
# checkpoint computes again inside of the backward; here the schedule says when.
#
# To offload, whole storages are copied, not tensors: views that shared memory share it again afterwards. Weights and
# buffers stay where they are. torch does not check whether a tensor was written after it was saved if the graph has a
# holder for it, so the holder does. What a recomputation saves of tensors that are then restored, it keeps as a copy.
#
# `detach` breaks a cycle: an operator that saves its own output would otherwise hold a tensor whose graph holds the
# operator.


class HostMemory:
    """The memory of the host for what a rank on `device` offloads: pinned for a GPU; memory or files for a CPU.

    Attributes:
        folder: the folder of the files, each of which is gone when its tensors are; None for memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.folder: Path | None = None

    def use(self, folder: str | os.PathLike[str] | None) -> None:
        """Puts what is offloaded from now on into files of a folder. Raises UsageError if there is no such folder, and
        for a rank on a GPU.
        """
        if folder is not None and self._device.type != "cpu":
            raise UsageError(f"offload_folder is for ranks on CPUs, but this one is on {self._device}: set it to None")
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(f"offload_folder: there is no folder {os.fspath(folder)}: make it first")
        self.folder = None if folder is None else Path(folder)

    def empty(self, size: int) -> Tensor:
        """So many bytes. Raises UsageError if the disk is full."""
        if self.folder is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        try:
            with TemporaryFile(dir=self.folder) as file:  # it has no name: the system frees it with its last use
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would end the process at a write
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            raise UsageError(
                f"offload_folder {self.folder}: {error.strerror}, but {size} bytes of a microbatch go there: choose "
                "another folder"
            ) from None


class Holder:
    """A tensor on its device or on the host, or one that is to be computed again. Autograd's graph has the holder in
    place of the tensor, so that its memory can be freed before the graph is.
    """

    __slots__ = ("device", "form", "host", "stays", "tensor", "version")

    def __init__(self, tensor: Tensor, *, drop: bool = False, stays: bool = False) -> None:
        self.form = tensor.size(), tensor.dtype  # that of a tensor that is computed again, too
        self.device = tensor.device
        self.host: Tensor | None = None  # the same on the host, where views share their memory, too
        self.stays = stays  # on its device, as a buffer
        self.tensor: Tensor | None = None
        if not drop:
            self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        """Holds a tensor, which nobody may write until it is used."""
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpacked(self) -> Tensor:
        """The tensor, which is on its device when it is used: a sound schedule has the recomputation or load before.
        Raises UsageError if it was written since it was saved.
        """
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise UsageError(
                f"a tensor that a forward needs for its gradient, {_said(self.form)}, was written in place afterwards: "
                "if it is a buffer that a later forward writes, use buffer.clone() in the forward"
            )
        return self.tensor


def storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Numbers that stand for the memory of `tensors`; the same for views of each other."""
    return frozenset(map(_storage, tensors))


class _Filled(BaseException):
    """Ends a recomputation that has made all that its backward needs, as in torch.utils.checkpoint. No `except
    Exception` of a module catches it.
    """


class Saved:
    """What one forward of a stage saved.

    Attributes:
        holders: what can be moved to the host now.
        dropped: what a recomputation makes, in the order in which autograd saved it.
    """

    def __init__(self, stage: int, host: HostMemory) -> None:
        self._stage = stage
        self._host = host
        self.holders: list[Holder] = []
        self.dropped: list[Holder] = []

    def forget(self) -> None:
        """Leaves the tensors to the graph, so that each is freed as soon as the backward has used it."""
        self.holders, self.dropped = [], []

    def catching(self, others: frozenset[int], buffers: frozenset[int], *, drop: bool) -> saved_tensors_hooks:
        """A region in which autograd gets holders for what it saves, empty ones to `drop` it. Tensors whose memory is
        among `others`, such as weights, get none; those of `buffers` are not moved.
        """
        holders = self.dropped if drop else self.holders

        def pack(tensor: Tensor) -> Tensor | Holder:
            storage = _storage(tensor)
            if storage in others:
                return tensor.detach()
            holders.append(Holder(tensor, drop=drop, stays=storage in buffers))
            return holders[-1]

        return saved_tensors_hooks(pack, _unpack)

    def fill(self, others: frozenset[int], forward: Callable[[], object]) -> None:
        """Calls `forward` until what autograd saves has filled the dropped holders. Raises UsageError if other tensors
        are saved than the first time.
        """
        empty = iter(self.dropped)

        def pack(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in others:
                self._fill(next(empty), tensor)
            return tensor.detach()

        # Python 3.12 keeps the frames of an exception that a generator catches, and so their tensors
        with saved_tensors_hooks(pack, _unpack), suppress(_Filled):
            forward()
        if missing := sum(holder.tensor is None for holder in self.dropped):
            raise self._differs(f"{len(self.dropped) - missing} tensors", f"{len(self.dropped)}")
        self.holders, self.dropped = self.dropped, []

    def _fill(self, holder: Holder, tensor: Tensor) -> None:
        """Puts a tensor into a dropped holder. Raises _Filled after the last one."""
        if (form := (tensor.size(), tensor.dtype)) != holder.form:
            raise self._differs(f"a tensor of {_said(form)}", f"one of {_said(holder.form)}")
        holder.hold(tensor)
        if holder is self.dropped[-1]:
            raise _Filled

    def _differs(self, now: str, before: str) -> UsageError:
        return UsageError(
            f"stage {self._stage} saved {now} for its backward when it was computed again, the first time {before}: a "
            "stage that is recomputed must do the same each time"
        )

    def keep(self, overwritten: frozenset[int]) -> None:
        """Copies the held tensors whose memory is among `overwritten`. Raises UsageError for one that was written since
        it was saved.
        """
        for holder in self.holders if overwritten else ():
            if holder.tensor is not None and _storage(holder.tensor) in overwritten:
                holder.hold(holder.unpacked().clone())
                holder.stays = False

    def to_host(self, stream: torch.cuda.Stream | None = None) -> list[Tensor]:
        """Moves what it holds to the host, on a GPU with copies on `stream`. Tensors that share memory share it
        there. Returns the memory that the copies read, to be kept until they have ended. Raises UsageError if a disk
        is full.
        """
        hosts: dict[int, Tensor] = {}
        read: list[Tensor] = []
        for holder in self.holders:
            tensor = holder.tensor
            if tensor is None or holder.stays or not _is_movable(tensor):
                continue
            if (storage := _storage(tensor)) not in hosts:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                host = self._host.empty(len(whole))
                with torch.cuda.stream(stream):  # no region if it is None
                    hosts[storage] = host.copy_(whole, non_blocking=True)
                if stream is not None:  # else the copy has ended
                    read.append(whole)
            holder.host = _like(tensor, hosts[storage])
            holder.tensor = tensor = None
        return read

    def to_device(self, stream: torch.cuda.Stream | None = None) -> list[Tensor]:
        """Moves what is on the host back to the memory of its device, on a GPU with copies on `stream`. Returns the
        memory that the copies read.
        """
        devices: dict[int, Tensor] = {}
        for holder in self.holders:
            if (host := holder.host) is None:
                continue
            if (storage := _storage(host)) not in devices:
                whole = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
                devices[storage] = torch.empty_like(whole, device=holder.device, pin_memory=False)
                with torch.cuda.stream(stream):
                    devices[storage].copy_(whole, non_blocking=True)
            holder.hold(_like(host, devices[storage]))
        read = [holder.host for holder in self.holders if holder.host is not None and stream is not None]
        for holder in self.holders:  # addresses of hosts identify them until all have moved
            holder.host = None
        return read


def _said(form: tuple[torch.Size, torch.dtype]) -> str:
    return f"{form[1]} of shape {tuple(form[0])}"


def _unpack(held: Tensor | Holder) -> Tensor:
    return held if isinstance(held, Tensor) else held.unpacked()


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """A tensor that lies in `memory` as another one lies in its own."""
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), int(tensor.storage_offset()), tensor.size(), tensor.stride())


def _storage(tensor: Tensor) -> int:
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _is_movable(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory, which can be copied byte by byte."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and not tensor.is_conj() and not tensor.is_neg() and tensor.untyped_storage().nbytes() > 0
