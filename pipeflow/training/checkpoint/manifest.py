"""What a checkpoint says of itself, as JSON that is checked in full when it is read, so nothing in it can run code or
point outside the checkpoint.

The manifest has the step, the order of saving, the layout, and every file with its size and digest. It contains a
digest of itself, so damage to it is detected too. It protects against accidents, not against forgery. The index has
dtype, shape and parts of every tensor, and the place of each part and each plain value in the files. It is also written
in the format of torch.distributed.checkpoint, a pickle that is never read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.torch_private.dtensors import StorageInfo
from pipeflow.training.checkpoint.folders import INDEX, MANIFEST, TORCHS, previous, write_durably

FORMAT = 2  # increased when older versions could not read the new format
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Digest:
    """The expected size and SHA-256 of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Digest:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(file.stat().st_size, digest)

    @classmethod
    def of_bytes(cls, content: bytes) -> Digest:
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def read(cls, content: Any) -> Digest:
        """Reads it from JSON. Raises ValueError, KeyError or TypeError for invalid JSON."""
        if not re.fullmatch("[0-9a-f]{64}", content["sha256"]):
            raise ValueError(f"{content['sha256']!r} is not a SHA-256")
        return cls(whole_number(content["size"]), content["sha256"])


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint, without its tensors.

    Attributes:
        step: number of steps that the run had taken; None if `save_checkpoint` was not given one.
        sequence: number of the save, larger than that of every save begun before in the same folder.
        layout: the layout of the ranks that saved it.
        files: size and digest of every file except the manifest, by name.
    """

    step: int | None
    sequence: int
    layout: WorldLayout
    files: Mapping[str, Digest]

    @property
    def content(self) -> str:
        """One SHA-256 of all files."""
        return _sha256({name: digest.sha256 for name, digest in self.files.items()})

    def write(self, folder: Path) -> None:
        """Writes the manifest into `folder` and flushes it to the disk. Raises OSError if that fails."""
        content = {"format": FORMAT, **asdict(self)}
        write_durably(folder / MANIFEST, json.dumps({**content, "sha256": _sha256(content)}, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint. Raises UsageError if it is damaged, or of another format."""
        content = read_json(folder / MANIFEST, (folder / MANIFEST).read_bytes, _mapping)
        _require_format(folder, content.get("format"))
        return read_json(folder / MANIFEST, lambda: content, cls._of)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Manifest:
        if content.pop("sha256") != _sha256(content):
            raise ValueError("its SHA-256 does not match")
        step, layout = content["step"], content["layout"]
        files = {file_name(name): Digest.read(digest) for name, digest in content["files"].items()}
        if INDEX not in files:
            raise ValueError(f"it does not list {INDEX}")
        return cls(
            None if step is None else whole_number(step),
            whole_number(content["sequence"]),
            WorldLayout(*(whole_number(layout[name]) for name in ("pipeline", "tensor", "data"))),
            files,
        )

    def require_sizes(self, folder: Path) -> None:
        """Raises UsageError for the first file that is missing or has another size than was written."""
        for name, digest in self.files.items():
            file = folder / name
            if not file.is_file() or file.is_symlink():
                what = "a link, not a file" if file.is_symlink() else "missing"
                raise UsageError(f"{file} is {what}: the checkpoint is damaged; load an earlier one")
            if (size := file.stat().st_size) != digest.size:
                raise UsageError(
                    f"{file} is damaged: it has {size} bytes instead of {digest.size}; load an earlier checkpoint"
                )

    def require_digests(self, folder: Path, names: Iterable[str]) -> None:
        """Raises UsageError for the first file in `names` whose content has changed."""
        for name in names:
            if Digest.of(folder / name) != self.files[name]:
                raise UsageError(f"{folder / name} is damaged: its SHA-256 does not match; load an earlier checkpoint")


def find(path: Path) -> Path:
    """The folder of the checkpoint called `path`. Raises UsageError if there is none."""
    try:
        path = path if path.name not in ("", "..") else path.resolve()
        for folder in (path, previous(path)):
            if (folder / MANIFEST).is_file() and not (folder / MANIFEST).is_symlink():
                return folder
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise UsageError(f"{path} is not a checkpoint: {error}") from error
    hint = ", and latest_checkpoint(folder) finds the newest in a folder" if is_folder else ""
    what = f"has no {MANIFEST}" if is_there else "does not exist"
    raise UsageError(f"{path} is not a checkpoint: it {what}; save_checkpoint writes one{hint}")


def verified(folder: Path, rank: int, ranks: int) -> Manifest:
    """Returns the manifest of a checkpoint after a check of its files. The sizes of all files are checked, and the
    digests of this rank's share: `rank` is its index among `ranks`. If `ranks` is 0, no digests are checked. Raises
    UsageError for damaged or unreadable files.
    """
    manifest = Manifest.read(folder)
    try:
        manifest.require_sizes(folder)
        manifest.require_digests(folder, sorted(manifest.files)[rank::ranks] if ranks else ())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error}; load an earlier checkpoint") from error
    return manifest


def read_json(
    file: Path, content: Callable[[], Any], of: Callable[[Any], T], *, advice: str = "load an earlier checkpoint"
) -> T:
    """The result of `of` for the content of `file`; bytes are parsed as JSON. Raises UsageError, which ends with the
    `advice`, if that fails.
    """
    try:
        found = content()
        return of(json.loads(found) if isinstance(found, bytes) else found)
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise UsageError(f"{file} is damaged: {reason}; {advice}") from error


def whole_number(value: Any) -> int:
    """`value`, if it is an int of at least 0; otherwise raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def file_name(value: Any) -> str:
    """`value`, if it is the name of a file in the checkpoint's own folder; otherwise raises ValueError."""
    if not isinstance(value, str) or value != Path(value).name or value in ("", "..") or "\0" in value:
        raise ValueError(f"{value!r} is not the name of a file in its folder")
    return value


def _mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}")
    return content


def _require_format(folder: Path, found: Any) -> None:
    if type(found) is int and found > FORMAT:
        raise UsageError(
            f"{folder} was written by a newer pipeflow: its format is {found}, and this pipeflow reads {FORMAT}; "
            "update pipeflow"
        )
    if type(found) is not int or found != FORMAT:
        raise UsageError(f"{folder} has format {found!r}, but this pipeflow reads {FORMAT}: load another checkpoint")


def _sha256(content: Mapping[str, Any]) -> str:
    """The SHA-256 of JSON content, independent of its spacing."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


Sizes = tuple[int, ...]


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
class StoredPart:
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
    parts: tuple[StoredPart, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            dims = zip(part.offset, part.sizes, self.shape, strict=True)
            if any(start + size > whole for start, size, whole in dims):
                raise ValueError(f"a part of {part.sizes} at {part.offset} lies outside the whole, {self.shape}")
        if sum(math.prod(part.sizes) for part in self.parts) != math.prod(self.shape):
            raise ValueError(f"the parts do not make up the whole, {self.shape}")
        if any(0 in part.sizes for part in self.parts) and 0 not in self.shape:
            raise ValueError(f"a part of {self.shape} is empty")
        if _overlap(self.parts, len(self.shape)):
            raise ValueError(f"two parts of {self.shape} overlap")

    @classmethod
    def read(cls, content: Any, files: Mapping[str, Digest]) -> Stored:
        """Reads it from JSON. Raises ValueError, KeyError or TypeError for invalid JSON."""
        dtype, shape = dtype_named(content["dtype"]), _sizes(content["shape"])
        parts = []
        for offset, sizes, *where in content["parts"]:
            part = StoredPart(_sizes(offset), _sizes(sizes), Where.read(where, files))
            if math.prod(part.sizes) * dtype.itemsize > part.where.length:
                raise ValueError(f"{part.where.length} bytes of {where[0]!r} are too few for a part of {part.sizes}")
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
        values = {name: Where.read(where, files) for name, where in content["values"].items()}
        parts = [part.where for stored in tensors.values() for part in stored.parts]
        _require_apart([*parts, *values.values()])
        return cls(tensors, values)

    def write_for_torch(self, folder: Path) -> None:
        """Writes the index for torch.distributed.checkpoint. Raises OSError."""
        infos = {
            MetadataIndex(name, torch.Size(part.offset)): StorageInfo(*_fields(part.where))
            for name, stored in self.tensors.items()
            for part in stored.parts
        }
        infos |= {MetadataIndex(name): StorageInfo(*_fields(where)) for name, where in self.values.items()}
        entries = {name: _for_torch(stored) for name, stored in self.tensors.items()}
        values = {name: BytesStorageMetadata() for name in self.values}
        write_durably(folder / TORCHS, pickle.dumps(Metadata({**entries, **values}, storage_data=infos)))


def _require_apart(places: Sequence[Where]) -> None:
    """Raises ValueError if two places have bytes in common: so all together are not longer than the files."""
    for one, other in pairwise(sorted(places, key=lambda each: (each.file, each.begin))):
        if one.file == other.file and one.begin + one.length > other.begin:
            raise ValueError(f"bytes {other.begin} of {one.file!r} are in two places")


def _overlap(parts: Sequence[StoredPart], dims: int) -> bool:
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
