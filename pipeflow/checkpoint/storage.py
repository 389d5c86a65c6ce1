"""A checkpoint's data files: a rank writes its part of what is to be saved, and reads what makes up the pieces that it
holds. Tensors and plain values lie one after the other, each as `torch.save` writes it, which is the format of
torch.distributed.checkpoint. What must not live here: names of weights, and who writes what.
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
class Content:
    """What a rank has to write, by name: pieces of tensors, and plain values as `to_bytes` makes them."""

    pieces: Mapping[str, Piece]
    values: Mapping[str, bytes]

    def copied(self) -> Content:
        """The same in memory of its own, on the CPU."""
        return Content({name: piece.copied() for name, piece in self.pieces.items()}, self.values)


def to_bytes(name: str, value: object) -> bytes:
    """A plain value as it is stored. Raises UsageError for one that could not be read back."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        _loaded(stream.getvalue())
    except Exception as error:  # pickle's errors are of many kinds
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name} holds more than plain values and tensors: convert it first ({reason})") from error
    return stream.getvalue()


def _loaded(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored), weights_only=True, map_location="cpu")


class _Sink:
    """A file that is being written, digested on the way."""

    def __init__(self, file: Path) -> None:
        self.name = file.name
        self.error: OSError | None = None
        self.bytes = 0
        self._stream = file.open("xb")
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except OSError as error:  # torch.save would tell of a position that it did not expect
            self.error = error
            raise
        self._hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """torch.save asks; it is done at the end."""

    def save(self, value: Tensor) -> Where:
        """Appends a tensor. Raises OSError."""
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
        """Appends bytes. Raises OSError."""
        return Where(self.name, self.bytes, self.write(value))

    def close(self) -> Digest:
        """Returns when the disk has all. Raises OSError."""
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return Digest(self.bytes, self._hash.hexdigest())


def write(file: Path, content: Content) -> tuple[dict[str, Where], Digest]:
    """Writes a rank's part until the disk has it; returns where everything is, and the digest. Raises OSError."""
    sink = _Sink(file)
    places = {name: sink.append(value) for name, value in content.values.items()}
    places |= {name: sink.save(_compact(piece.tensor)) for name, piece in content.pieces.items()}
    return places, sink.close()


def _compact(tensor: Tensor) -> Tensor:
    """On the CPU, in memory that holds nothing else."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class Storage:
    """A checkpoint's content, open for reading. Raises UsageError where its index is damaged."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        index = read_json(folder / INDEX, self._index, lambda content: Index.read(content, manifest.files))
        self.tensors, self.values = index.tensors, index.values

    def _index(self) -> bytes:
        content = (self._folder / INDEX).read_bytes()
        if Digest.of_bytes(content) != self._manifest.files[INDEX]:
            raise ValueError("its SHA-256 is another")
        return content

    def value(self, name: str) -> Any:
        """The plain value of that name. Raises UsageError for one that is not there, or not as it was written."""
        if name not in self.values:
            raise UsageError(f"{self._folder} has no {name!r}: the checkpoint is damaged; load an earlier one")
        return self._read(name, self.values[name])

    def require_readable(self, rank: int, ranks: int) -> None:
        """Reads all plain values and, of the tensors, the share of `rank` of so many. Raises UsageError for one that is
        not what the index says.
        """
        for name in self.values:
            self.value(name)
        for name in sorted(self.tensors)[rank::ranks]:
            for part in self.tensors[name].parts:
                self._tensor(name, part)

    def parts_of(self, pieces: Mapping[str, Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        """What makes up the pieces, part by part: the entries of a piece, and the values that were saved for them.

        Raises UsageError for a tensor that is not what the index says.
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
            raise self._damaged(name, part.where, "it holds something else than was saved")
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
    """Puts saved values where they belong."""
    for entries, saved in parts:
        entries.copy_(saved)
