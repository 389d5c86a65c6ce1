"""A checkpoint's data files: which rank writes which part of the content, how it writes it, and how a rank reads the
parts of its own pieces. Tensors and plain values follow one another, each as `torch.save` writes it, as in
torch.distributed.checkpoint. Must not contain: names of weights.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.training.checkpoint.folders import INDEX
from pipeflow.training.checkpoint.manifest import (
    Digest,
    Index,
    Manifest,
    Sizes,
    Stored,
    StoredPart,
    Where,
    dtype_name,
    dtype_named,
    read_json,
)
from pipeflow.training.checkpoint.pieces import Piece, apart, name_of_whole
from pipeflow.training.checkpoint.plain import loaded


@dataclass(frozen=True, slots=True)
class RankContent:
    """The content that a rank has to write, by name: pieces of tensors, and plain values as bytes from `to_bytes`."""

    pieces: Mapping[str, Piece]
    values: Mapping[str, bytes]

    def copied(self) -> RankContent:
        """A copy on the CPU. A GPU may still be writing it: a Task waits for that."""
        return RankContent({name: piece.copied() for name, piece in self.pieces.items()}, self.values)


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
        self.name = file.name
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

    def save(self, value: Tensor) -> Where:
        """Appends a tensor as `torch.save` writes it, and returns where it is. Raises OSError if writing fails."""
        begin = self.bytes
        try:
            torch.save(value, cast(IO[bytes], self))
        except RuntimeError:
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error
        return Where(self.name, begin, self.bytes - begin)

    def append(self, value: bytes) -> Where:
        """Appends bytes and returns where they are. Raises OSError if writing fails."""
        return Where(self.name, self.bytes, self.write(value))

    def close(self) -> Digest:
        """Flushes the file to disk and returns its digest. Raises OSError."""
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return Digest(self.bytes, self._hash.hexdigest())


def write(file: Path, content: RankContent) -> tuple[dict[str, Where], Digest]:
    """Writes a rank's part to disk. Returns the place of each entry, and the file's digest. Raises OSError."""
    sink = _Sink(file)
    places = {name: sink.append(value) for name, value in content.values.items()}
    places |= {name: sink.save(_compact(piece.tensor)) for name, piece in content.pieces.items()}
    return places, sink.close()


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in a storage that holds nothing else."""
    if tensor.device.type == "cuda":
        entries = tensor.detach().contiguous()  # as in Piece.copied
        tensor = entries.to("cpu", non_blocking=True)  # through pinned memory, which is several times faster
        torch.cuda.current_stream().synchronize()
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class CheckpointStorage:
    """A checkpoint's content, open for reading. Raises UsageError if its index is damaged."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        index = read_json(folder / INDEX, self._index, lambda content: Index.read(content, manifest.files))
        self.tensors, self.values = index.tensors, index.values

    def _index(self) -> bytes:
        content = (self._folder / INDEX).read_bytes()
        if Digest.of_bytes(content) != self._manifest.files[INDEX]:
            raise ValueError("its SHA-256 does not match")
        return content

    def value(self, name: str) -> Any:
        """The plain value `name`. Raises UsageError if it is missing or damaged."""
        if name not in self.values:
            raise UsageError(f"{self._folder} has no {name!r}: the checkpoint is damaged; load an earlier one")
        return self._read(name, self.values[name])

    def require_readable(self, rank: int, ranks: int) -> None:
        """Reads all plain values, and the share of the tensors that falls to `rank` of `ranks`. Raises UsageError for
        one that does not agree with the index.
        """
        for name in self.values:
            self.value(name)
        for name in sorted(self.tensors)[rank::ranks]:
            for part in self.tensors[name].parts:
                self._tensor(name, part)

    def parts_of(self, pieces: Mapping[str, Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs of tensors that together fill the pieces: a view of a piece, and the saved values for it.

        Raises UsageError for a tensor that does not agree with the index.
        """
        for key, piece in apart(pieces).items():
            name = name_of_whole(key)
            for part in self.tensors[name].parts:
                if part.overlaps(piece.offset, piece.tensor.shape):
                    saved, wanted = part.slices(piece.offset, piece.tensor.shape)
                    yield piece.tensor[wanted], self._tensor(name, part)[saved]

    def _tensor(self, name: str, part: StoredPart) -> Tensor:
        stored = self.tensors[name]
        tensor: Tensor = self._read(name, part.where)
        fits = isinstance(tensor, Tensor) and (tensor.dtype, tuple(tensor.shape)) == (stored.dtype, part.sizes)
        if not fits or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise self._damaged(name, part.where, "it is not the tensor that was saved")
        return tensor

    def _read(self, name: str, where: Where) -> Any:
        try:
            with (self._folder / where.file).open("rb") as stream:
                stream.seek(where.begin)
                return loaded(stream.read(where.length))
        except Exception as error:  # pickle's errors are of many kinds
            raise self._damaged(name, where, f"it cannot be read ({type(error).__name__})") from error

    def _damaged(self, name: str, where: Where, reason: str) -> UsageError:
        return UsageError(f"{name!r} in {self._folder / where.file} is damaged: {reason}; load an earlier checkpoint")


@torch.no_grad()
def fill(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies saved values into the pieces."""
    for entries, saved in parts:
        entries.copy_(saved)


class WriteItem(NamedTuple):
    """What a rank could write: a part of a tensor, or a plain value (without a dtype)."""

    name: str
    bytes: int
    dtype: str | None = None
    shape: Sizes = ()
    offset: Sizes = ()
    sizes: Sizes = ()


def write_items(content: RankContent) -> list[tuple[Any, ...]]:
    """The WriteItems of a rank as plain tuples."""
    values = [WriteItem(name, len(value)) for name, value in content.values.items()]
    parts = [
        WriteItem(
            name,
            piece.tensor.nbytes,
            dtype_name(piece.tensor.dtype),
            tuple(piece.shape),
            tuple(piece.offset),
            tuple(piece.tensor.shape),
        )
        for name, piece in content.pieces.items()
        if piece.tensor.numel() or not piece.shape.numel()
    ]
    return [tuple(item) for item in (*values, *parts)]


@dataclass(frozen=True, slots=True)
class Division:
    """The items that each rank of the world writes; the same on every rank. A part that several ranks hold is written
    once, by the rank that has least to write.
    """

    ranks: tuple[tuple[WriteItem, ...], ...]

    @classmethod
    def of(cls, everyone: Sequence[Sequence[tuple[Any, ...]]]) -> Division:
        """Divides the items of all ranks, the largest first."""
        holders: dict[tuple[str, Sizes], list[int]] = defaultdict(list)
        items: dict[tuple[str, Sizes], WriteItem] = {}
        for rank, one in enumerate(everyone):
            for item in (WriteItem(*each) for each in one):
                holders[item.name, item.offset].append(rank)
                items.setdefault((item.name, item.offset), item)
        ranks: list[list[WriteItem]] = [[] for _ in everyone]
        loads = [0] * len(everyone)
        for key in sorted(items, key=lambda key: (-items[key].bytes, key)):
            writer = min(holders[key], key=loads.__getitem__)
            ranks[writer].append(items[key])
            loads[writer] += items[key].bytes
        return cls(tuple(map(tuple, ranks)))

    def share(self, rank: int, content: RankContent) -> RankContent:
        """The part of its `content` that `rank` writes."""
        names = {item.name for item in self.ranks[rank]}
        pieces = {name: piece for name, piece in content.pieces.items() if name in names}
        return RankContent(pieces, {name: value for name, value in content.values.items() if name in names})

    def index(self, places: Sequence[Mapping[str, Where]]) -> Index:
        """The index of the checkpoint, from the `places` that each rank wrote to. Raises UsageError if the parts of a
        tensor do not make up the whole.
        """
        found: dict[str, list[WriteItem]] = defaultdict(list)
        parts: dict[str, list[StoredPart]] = defaultdict(list)
        values: dict[str, Where] = {}
        for item, written in ((item, written) for one, written in zip(self.ranks, places, strict=True) for item in one):
            if item.dtype is None:
                values[item.name] = written[item.name]
            else:
                found[name_of_whole(item.name)].append(item)
                parts[name_of_whole(item.name)].append(StoredPart(item.offset, item.sizes, written[item.name]))
        return Index({name: _stored(name, items, parts[name]) for name, items in found.items()}, values)

    def require_whole(self) -> None:
        """Raises UsageError if the parts of a tensor do not make up the whole."""
        self.index([{item.name: Where("", 0, 0) for item in one} for one in self.ranks])


def _stored(name: str, items: Sequence[WriteItem], parts: Sequence[StoredPart]) -> Stored:
    first = items[0]
    if len({(item.dtype, item.shape) for item in items}) > 1:
        raise UsageError(f"{name!r} is {first.dtype} {first.shape} on one rank, but differs on another")
    try:
        return Stored(dtype_named(first.dtype), first.shape, tuple(parts))
    except ValueError as error:
        raise UsageError(f"the ranks' parts of {name!r} do not make up the whole: {error}") from error
