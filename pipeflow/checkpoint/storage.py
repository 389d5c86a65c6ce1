"""A checkpoint's data files: a rank writes its part of the content, and reads the parts of its own pieces. Tensors and
plain values follow one another, each as `torch.save` writes it, as in torch.distributed.checkpoint. Must not contain:
names of weights, or which rank writes what.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from pipeflow.checkpoint.index import Index, Part, Where
from pipeflow.checkpoint.manifest import INDEX, Digest, Manifest, read_json
from pipeflow.checkpoint.pieces import Piece, apart, name_of_whole
from pipeflow.core.errors import UsageError


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
        _loaded(stream.getvalue())
    except Exception as error:  # pickle's errors are of many kinds
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name} must only contain plain values and tensors: convert it first ({reason})") from error
    return stream.getvalue()


def _loaded(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored), weights_only=True, map_location="cpu")


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

    def _tensor(self, name: str, part: Part) -> Tensor:
        stored = self.tensors[name]
        tensor: Tensor = self._read(name, part.where)
        fits = isinstance(tensor, Tensor) and (tensor.dtype, tuple(tensor.shape)) == (stored.dtype, part.sizes)
        if not fits or tensor.layout is not torch.strided:
            raise self._damaged(name, part.where, "it is not the tensor that was saved")
        return tensor

    def _read(self, name: str, where: Where) -> Any:
        try:
            with (self._folder / where.file).open("rb") as stream:
                stream.seek(where.begin)
                return _loaded(stream.read(where.length))
        except Exception as error:  # pickle's errors are of many kinds
            raise self._damaged(name, where, f"it cannot be read ({type(error).__name__})") from error

    def _damaged(self, name: str, where: Where, reason: str) -> UsageError:
        return UsageError(f"{name!r} in {self._folder / where.file} is damaged: {reason}; load an earlier checkpoint")


@torch.no_grad()
def fill(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies saved values into the pieces."""
    for entries, saved in parts:
        entries.copy_(saved)
