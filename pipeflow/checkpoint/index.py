"""The index of a checkpoint: dtype, shape and parts of every tensor, and the place of each part and each plain value in
the files. It is stored as JSON and checked in full when it is read, so nothing in it can run code or point outside the
checkpoint. It is also written in the format of torch.distributed.checkpoint, a pickle that is never read here.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeflow.checkpoint.folders import write_durably
from pipeflow.checkpoint.manifest import Digest, file_name, whole_number

Sizes = tuple[int, ...]
TORCHS = ".metadata"  # the file that torch.distributed.checkpoint reads


@dataclass(frozen=True, slots=True)
class Where:
    """A range of bytes in a file."""

    file: str
    begin: int
    length: int

    @classmethod
    def read(cls, content: Any, files: Mapping[str, Digest]) -> Where:
        """Reads it from JSON. Raises ValueError if it is not within one of `files`."""
        file, begin, length = content
        where = cls(file_name(file), whole_number(begin), whole_number(length))
        if file not in files or begin + length > files[file].size:
            raise ValueError(f"{file!r} does not have bytes {begin} to {begin + length}")
        return where


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor: its offset in the whole, its sizes, and where it is stored."""

    offset: Sizes
    sizes: Sizes
    where: Where

    def overlaps(self, offset: Sizes, sizes: Sizes) -> bool:
        """True if it shares an entry with the part at `offset` of these `sizes`."""
        return all(slices is not None for slices in self._common(offset, sizes)) and 0 not in (*self.sizes, *sizes)

    def slices(self, offset: Sizes, sizes: Sizes) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The entries shared with an overlapping part: their slices in this part and in the other one."""
        common = [each for each in self._common(offset, sizes) if each is not None]
        mine = tuple(slice(start - at, end - at) for (start, end), at in zip(common, self.offset, strict=True))
        other = tuple(slice(start - at, end - at) for (start, end), at in zip(common, offset, strict=True))
        return mine, other

    def _common(self, offset: Sizes, sizes: Sizes) -> list[tuple[int, int] | None]:
        dims = zip(self.offset, self.sizes, offset, sizes, strict=True)
        ends = [(max(mine, other), min(mine + size, other + its)) for mine, size, other, its in dims]
        return [(start, end) if start < end else None for start, end in ends]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint. Raises ValueError unless the parts contain each entry of the whole exactly once."""

    dtype: torch.dtype
    shape: Sizes
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            dims = zip(part.offset, part.sizes, self.shape, strict=True)
            if any(start + size > whole for start, size, whole in dims):
                raise ValueError(f"a part of {part.sizes} at {part.offset} lies outside the whole, {self.shape}")
        if sum(math.prod(part.sizes) for part in self.parts) != math.prod(self.shape):
            raise ValueError(f"the parts do not make up the whole, {self.shape}")
        if any(one.overlaps(other.offset, other.sizes) for one, other in combinations(self.parts, 2)):
            raise ValueError(f"two parts of {self.shape} overlap")

    @classmethod
    def read(cls, content: Any, files: Mapping[str, Digest]) -> Stored:
        """Reads it from JSON. Raises ValueError, KeyError or TypeError for invalid JSON."""
        dtype, shape = dtype_named(content["dtype"]), _sizes(content["shape"])
        parts = []
        for offset, sizes, *where in content["parts"]:
            part = Part(_sizes(offset), _sizes(sizes), Where.read(where, files))
            if math.prod(part.sizes) * dtype.itemsize > files[where[0]].size:
                raise ValueError(f"{where[0]!r} is too short for a part of {part.sizes}")
            parts.append(part)
        return cls(dtype, shape, tuple(parts))


@dataclass(frozen=True, slots=True)
class Index:
    """All tensors and plain values of a checkpoint, by name."""

    tensors: Mapping[str, Stored]
    values: Mapping[str, Where]

    def content(self) -> dict[str, Any]:
        """The index as dicts and lists that `json.dumps` takes."""
        tensors = {
            name: {
                "dtype": dtype_name(stored.dtype),
                "shape": stored.shape,
                "parts": [(part.offset, part.sizes, *_fields(part.where)) for part in stored.parts],
            }
            for name, stored in self.tensors.items()
        }
        return {"tensors": tensors, "values": {name: _fields(where) for name, where in self.values.items()}}

    @classmethod
    def read(cls, content: Any, files: Mapping[str, Digest]) -> Index:
        """Reads it from JSON. Raises ValueError, KeyError, TypeError or AttributeError for invalid JSON."""
        tensors = {name: Stored.read(stored, files) for name, stored in content["tensors"].items()}
        return cls(tensors, {name: Where.read(where, files) for name, where in content["values"].items()})

    def write_for_torch(self, folder: Path) -> None:
        """Writes the index for torch.distributed.checkpoint. Raises OSError."""
        infos = {
            MetadataIndex(name, torch.Size(part.offset)): _StorageInfo(*_fields(part.where))
            for name, stored in self.tensors.items()
            for part in stored.parts
        }
        infos |= {MetadataIndex(name): _StorageInfo(*_fields(where)) for name, where in self.values.items()}
        entries = {name: _for_torch(stored) for name, stored in self.tensors.items()}
        values = {name: BytesStorageMetadata() for name in self.values}
        write_durably(folder / TORCHS, pickle.dumps(Metadata({**entries, **values}, storage_data=infos)))


def _for_torch(stored: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.sizes)) for part in stored.parts]
    return TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(stored.shape), chunks)


def _fields(where: Where) -> tuple[str, int, int]:
    return where.file, where.begin, where.length


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of that name. Raises ValueError if torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _sizes(content: Iterable[Any]) -> Sizes:
    return tuple(map(whole_number, content))
