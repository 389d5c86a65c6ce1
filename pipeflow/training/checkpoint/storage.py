"""A checkpoint's data files: parts of tensors and plain values, which follow one another, each as `torch.save` writes
it, as in torch.distributed.checkpoint; the index, which says where each of them is; and which rank writes which. Must
not contain: names of weights.

The index is JSON that is checked in full when it is read. It is also written in the format of
torch.distributed.checkpoint, a pickle that is never read here.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeflow.core.errors import UsageError
from pipeflow.engine.torch_private.distributed import StorageInfo
from pipeflow.training.checkpoint.folders import INDEX
from pipeflow.training.checkpoint.manifest import Digest, Manifest, file_name, read_json, whole_number
from pipeflow.training.checkpoint.pieces import Pieces
from pipeflow.training.checkpoint.plain import loaded

Sizes = tuple[int, ...]
Key = tuple[str, Sizes]
"""What distinguishes a part from others: the name and the offset in the whole."""


class Part(NamedTuple):
    """A part of a tensor, or a plain value, in a checkpoint. Ranks tell each other which they have, write them, and
    list them in the index.

    Attributes:
        name: name of the tensor or value.
        bytes: its size; as long as it is not written, that of its entries.
        dtype: dtype of the tensor, such as "float32"; None for a plain value.
        shape: shape of the whole tensor.
        offset, sizes: place in the whole tensor.
        file, begin: place in the checkpoint; unknown as long as it is not written.
    """

    name: str
    bytes: int
    dtype: str | None = None
    shape: Sizes = ()
    offset: Sizes = ()
    sizes: Sizes = ()
    file: str = ""
    begin: int = 0

    @property
    def key(self) -> Key:
        return self.name, self.offset

    def shared(self, offset: Sizes, sizes: Sizes) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The entries shared with a piece at `offset` of these `sizes`, as slices of this part and of the piece; None
        if there are none.
        """
        first = [*map(max, self.offset, offset)]
        ends = [min(*each) for each in zip(_ends(self.offset, self.sizes), _ends(offset, sizes), strict=True)]
        if any(start >= end for start, end in zip(first, ends, strict=True)):
            return None
        mine, its = (
            tuple(slice(start - at, end - at) for start, end, at in zip(first, ends, place, strict=True))
            for place in (self.offset, offset)
        )
        return mine, its


def _ends(offset: Sizes, sizes: Sizes) -> list[int]:
    return [start + size for start, size in zip(offset, sizes, strict=True)]


def tensors_in(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """The parts of tensors, by the tensor's name."""
    found: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        if part.dtype is not None:
            found[part.name].append(part)
    return dict(found)


def require_whole(parts: Sequence[Part]) -> None:
    """Raises ValueError unless the parts contain each entry of a tensor exactly once."""
    shape = parts[0].shape
    for part in parts:
        if any(end > whole for end, whole in zip(_ends(part.offset, part.sizes), shape, strict=True)):
            raise ValueError(f"a part of {part.sizes} at {part.offset} lies outside the whole, {shape}")
    if sum(math.prod(part.sizes) for part in parts) != math.prod(shape):
        raise ValueError(f"the parts do not make up the whole, {shape}")
    if any(0 in part.sizes for part in parts) and 0 not in shape:
        raise ValueError(f"a part of {shape} is empty")
    if _overlap(parts, len(shape)):
        raise ValueError(f"two parts of {shape} overlap")


def _overlap(parts: Sequence[Part], dims: int) -> bool:
    """True if two parts, all of which have entries, share one."""
    if len(parts) < 2 or any(0 in part.sizes for part in parts):
        return False
    begins = torch.tensor([part.offset for part in parts], dtype=torch.int64).reshape(len(parts), dims)
    ends = begins + torch.tensor([part.sizes for part in parts], dtype=torch.int64).reshape(len(parts), dims)
    widest = max(range(dims), key=lambda dim: len(set(begins[:, dim].tolist())), default=0)
    order = begins[:, widest].argsort() if dims else torch.arange(len(parts))
    begins, ends = begins[order], ends[order]
    along = begins[:, widest].contiguous() if dims else begins.sum(1)
    for index in range(len(parts) - 1):
        last = int(torch.searchsorted(along, ends[index, widest])) if dims else len(parts)
        others = slice(index + 1, last)  # those that begin before this one ends
        if last > index + 1 and ((begins[others] < ends[index]) & (ends[others] > begins[index])).all(1).any():
            return True
    return False


def index_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The index of these parts, as dicts and lists that `json.dumps` takes."""
    tensors = {
        name: {
            "dtype": each[0].dtype,
            "shape": each[0].shape,
            "parts": [(part.offset, part.sizes, part.file, part.begin, part.bytes) for part in each],
        }
        for name, each in tensors_in(parts).items()
    }
    values = {part.name: (part.file, part.begin, part.bytes) for part in parts if part.dtype is None}
    return {"tensors": tensors, "values": values}


def index_for_torch(parts: Sequence[Part]) -> bytes:
    """The index of these parts for torch.distributed.checkpoint."""
    entries: dict[str, Any] = {part.name: BytesStorageMetadata() for part in parts if part.dtype is None}
    for name, each in tensors_in(parts).items():
        chunks = [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.sizes)) for part in each]
        properties = TensorProperties(dtype_named(each[0].dtype))
        entries[name] = TensorStorageMetadata(properties, torch.Size(each[0].shape), chunks)
    places = {
        MetadataIndex(part.name, None if part.dtype is None else torch.Size(part.offset)): StorageInfo(
            part.file, part.begin, part.bytes
        )
        for part in parts
    }
    return pickle.dumps(Metadata(entries, storage_data=places))


def parts_in(index: Any, files: Mapping[str, Digest]) -> list[Part]:
    """The parts that an index in JSON lists. Raises ValueError, KeyError, TypeError or AttributeError for invalid JSON,
    and for a part that is not within one of the `files`.
    """
    parts = [_placed(Part(name, 0), place, files) for name, place in index["values"].items()]
    for name, tensor in index["tensors"].items():
        dtype, shape = tensor["dtype"], _sizes(tensor["shape"])
        itemsize = dtype_named(dtype).itemsize
        if not tensor["parts"]:
            raise ValueError(f"{name!r} has no parts")
        for offset, sizes, *place in tensor["parts"]:
            part = _placed(Part(name, 0, dtype, shape, _sizes(offset), _sizes(sizes)), place, files)
            if math.prod(part.sizes) * itemsize > part.bytes:
                raise ValueError(f"{part.bytes} bytes of {part.file!r} are too few for a part of {part.sizes}")
            parts.append(part)
    return parts


def _placed(part: Part, place: Any, files: Mapping[str, Digest]) -> Part:
    file, begin, length = place
    if file_name(file) not in files or whole_number(begin) + whole_number(length) > files[file].size:
        raise ValueError(f"{file!r} does not have bytes {begin} to {begin + length}")
    return part._replace(file=file, begin=begin, bytes=length)


def _checked_parts(index: Any, files: Mapping[str, Digest]) -> list[Part]:
    """Like `parts_in`, for all parts of a checkpoint: each tensor is whole, and no two parts have bytes in common, so
    all together are not longer than the files.
    """
    parts = parts_in(index, files)
    for each in tensors_in(parts).values():
        require_whole(each)
    for one, other in pairwise(sorted(parts, key=lambda part: (part.file, part.begin))):
        if one.file == other.file and one.begin + one.bytes > other.begin:
            raise ValueError(f"bytes {other.begin} of {one.file!r} are in two places")
    return parts


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of that name. Raises ValueError if torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _sizes(content: Iterable[Any]) -> Sizes:
    return tuple(map(whole_number, content))


def divided(everyone: Sequence[Sequence[Part]]) -> list[set[Key]]:
    """The parts that each rank writes, of those that it has. A part that several ranks have is written once, by the
    rank that has least to write; the largest parts are given away first.

    Raises UsageError if the parts of a tensor do not make up the whole.
    """
    holders: dict[Key, list[int]] = defaultdict(list)
    parts: dict[Key, Part] = {}
    for rank, one in enumerate(everyone):
        for part in one:
            holders[part.key].append(rank)
            parts.setdefault(part.key, part)
    for name, each in tensors_in(parts.values()).items():
        if len({(part.dtype, part.shape) for part in each}) > 1:
            raise UsageError(f"{name!r} is {each[0].dtype} {each[0].shape} on one rank, but differs on another")
        try:
            require_whole(each)
        except ValueError as error:
            raise UsageError(f"the ranks' parts of {name!r} do not make up the whole: {error}") from error
    shares: list[set[Key]] = [set() for _ in everyone]
    loads = [0] * len(everyone)
    for key in sorted(parts, key=lambda key: (-parts[key].bytes, key)):
        writer = min(holders[key], key=loads.__getitem__)
        shares[writer].add(key)
        loads[writer] += parts[key].bytes
    return shares


class WriteItem(NamedTuple):
    """A part with its content: a tensor, or the bytes of a plain value, from `to_bytes`."""

    part: Part
    content: Tensor | bytes

    def copied(self) -> WriteItem:
        """A copy on the CPU. A GPU may still be writing it, in pinned memory: a Task waits for that."""
        if isinstance(self.content, bytes):
            return self
        on_gpu = self.content.device.type == "cuda"
        entries = self.content.detach().contiguous()  # torch copies others again on the host, before they have come
        return WriteItem(self.part, entries.to("cpu", copy=True, non_blocking=on_gpu))


def write_items(pieces: Pieces, values: Mapping[str, bytes]) -> list[WriteItem]:
    """What a rank has to write: pieces of tensors, and the bytes of plain values, by name."""
    items = [WriteItem(Part(name, len(value)), value) for name, value in values.items()]
    for name, each in pieces.items():
        for piece in each:
            tensor, dtype = piece.tensor, str(piece.tensor.dtype).removeprefix("torch.")
            part = Part(name, tensor.nbytes, dtype, tuple(piece.shape), tuple(piece.offset), tuple(tensor.shape))
            items.append(WriteItem(part, tensor))
    return items


def to_bytes(name: str, value: object) -> bytes:
    """The bytes of a plain value in a checkpoint. Raises UsageError for a value that could not be read back."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        loaded(stream.getvalue())
    except Exception as error:  # pickle's errors are of many kinds
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name} must only contain plain values and tensors: convert it first ({reason})") from error
    return stream.getvalue()


class _Sink:
    """A file that is being written; its digest is computed on the way."""

    def __init__(self, file: Path) -> None:
        self.error: OSError | None = None
        self.bytes = 0
        self._stream = file.open("xb")
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except OSError as error:  # torch.save would only report an unexpected position
            self.error = error
            raise
        self._hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing; torch.save calls it, and `close` flushes."""

    def save(self, value: Tensor) -> None:
        """Appends a tensor as `torch.save` writes it. Raises OSError if writing fails."""
        try:
            torch.save(value, cast(IO[bytes], self))
        except RuntimeError:
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error

    def close(self) -> Digest:
        """Flushes the file to disk and returns its digest. Raises OSError."""
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return Digest(self.bytes, self._hash.hexdigest())


def write(file: Path, items: Iterable[WriteItem]) -> tuple[list[Part], Digest]:
    """Writes items to disk. Returns their parts with their places, and the file's digest. Raises OSError."""
    sink, written = _Sink(file), list[Part]()
    for part, content in items:
        begin = sink.bytes
        if isinstance(content, bytes):
            sink.write(content)
        else:
            sink.save(_compact(content))
        written.append(part._replace(file=file.name, begin=begin, bytes=sink.bytes - begin))
    return written, sink.close()


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in a storage that holds nothing else."""
    if tensor.device.type == "cuda":
        entries = tensor.detach().contiguous()  # as in WriteItem.copied
        tensor = entries.to("cpu", non_blocking=True)  # through pinned memory, which is several times faster
        torch.cuda.current_stream().synchronize()
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class CheckpointStorage:
    """A checkpoint's content, open for reading. Raises UsageError if its index is damaged.

    Attributes:
        tensors: the parts of each tensor, by its name.
        values: the plain values, by name.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        parts = read_json(folder / INDEX, self._index, lambda index: _checked_parts(index, manifest.files))
        self.tensors = tensors_in(parts)
        self.values = {part.name: part for part in parts if part.dtype is None}

    def _index(self) -> bytes:
        content = (self._folder / INDEX).read_bytes()
        if Digest.of_bytes(content) != self._manifest.files[INDEX]:
            raise ValueError("its SHA-256 does not match")
        return content

    def value(self, name: str) -> Any:
        """The plain value `name`. Raises UsageError if it is missing or damaged."""
        if name not in self.values:
            raise UsageError(f"{self._folder} has no {name!r}: the checkpoint is damaged; load an earlier one")
        return self._read(self.values[name])

    def require_readable(self, rank: int, ranks: int) -> None:
        """Reads all plain values, and the share of the tensors that falls to `rank` of `ranks`. Raises UsageError for
        one that does not agree with the index.
        """
        for name in self.values:
            self.value(name)
        for name in sorted(self.tensors)[rank::ranks]:
            for part in self.tensors[name]:
                self._tensor(part)

    def parts_of(self, pieces: Pieces) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs of tensors that together fill the pieces: a view of a piece, and the saved values for it.

        Raises UsageError for a tensor that does not agree with the index.
        """
        for name, each in pieces.items():
            for piece in each:
                for part in self.tensors[name]:
                    if (shared := part.shared(piece.offset, piece.tensor.shape)) is not None:
                        saved, wanted = shared
                        yield piece.tensor[wanted], self._tensor(part)[saved]

    def _tensor(self, part: Part) -> Tensor:
        tensor: Tensor = self._read(part)
        told = dtype_named(part.dtype), part.sizes
        fits = isinstance(tensor, Tensor) and (tensor.dtype, tuple(tensor.shape)) == told
        if not fits or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise self._damaged(part, "it is not the tensor that was saved")
        return tensor

    def _read(self, part: Part) -> Any:
        try:
            with (self._folder / part.file).open("rb") as stream:
                stream.seek(part.begin)
                return loaded(stream.read(part.bytes))
        except Exception as error:  # pickle's errors are of many kinds
            raise self._damaged(part, f"it cannot be read ({type(error).__name__})") from error

    def _damaged(self, part: Part, reason: str) -> UsageError:
        where = self._folder / part.file
        return UsageError(f"{part.name!r} in {where} is damaged: {reason}; load an earlier checkpoint")


@torch.no_grad()
def fill(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies saved values into the pieces."""
    for entries, saved in parts:
        entries.copy_(saved)
