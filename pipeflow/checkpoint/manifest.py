"""The manifest of a checkpoint: the step, the order of saving, the layout, and every file with its size and digest.
It carries a digest of itself, so that damage to it is found as damage to a file is. It protects from accidents, not
from somebody who writes a checkpoint of his own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeflow.checkpoint.folders import previous, write_durably
from pipeflow.core.errors import UsageError
from pipeflow.parallel.layout import Layout

FORMAT = 2  # raised when what is written could no longer be read by older versions
MANIFEST = "checkpoint.json"
INDEX = "index.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file must be: its size and its SHA-256."""

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
        """Raises ValueError, KeyError or TypeError for JSON that is none."""
        if not re.fullmatch("[0-9a-f]{64}", content["sha256"]):
            raise ValueError(f"{content['sha256']!r} is no SHA-256")
        return cls(whole_number(content["size"]), content["sha256"])


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is said of a checkpoint beside its tensors.

    Attributes:
        step: how many steps the run had taken, None when `save_checkpoint` was not told.
        sequence: greater than that of every checkpoint that was begun before in the same folder.
        layout: of the ranks that saved it.
        files: all files but the manifest, by name.
    """

    step: int | None
    sequence: int
    layout: Layout
    files: Mapping[str, Digest]

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        content = {"format": FORMAT, **asdict(self)}
        write_durably(folder / MANIFEST, json.dumps({**content, "sha256": _sha256(content)}, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises UsageError for one that is damaged, or of another format."""
        content = read_json(folder / MANIFEST, (folder / MANIFEST).read_bytes, _mapping)
        _require_format(folder, content.get("format"))
        return read_json(folder / MANIFEST, lambda: content, cls._of)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Manifest:
        if content.pop("sha256") != _sha256(content):
            raise ValueError("its SHA-256 is another")
        step, layout = content["step"], content["layout"]
        files = {file_name(name): Digest.read(digest) for name, digest in content["files"].items()}
        if INDEX not in files:
            raise ValueError(f"it lists no {INDEX}")
        return cls(
            None if step is None else whole_number(step),
            whole_number(content["sequence"]),
            Layout(*(whole_number(layout[name]) for name in ("pipeline", "tensor", "data"))),
            files,
        )

    def require_sizes(self, folder: Path) -> None:
        """Raises UsageError for the first file that is missing or not as long as it was written."""
        for name, digest in self.files.items():
            file = folder / name
            if not file.is_file():
                raise UsageError(f"{file} is missing: the checkpoint is damaged; load an earlier one")
            if (size := file.stat().st_size) != digest.size:
                raise UsageError(
                    f"{file} is damaged: it has {size} bytes, {digest.size} were written; load an earlier checkpoint"
                )

    def require_digests(self, folder: Path, names: Iterable[str]) -> None:
        """Raises UsageError for the first file of `names` that holds other bytes than were written."""
        for name in names:
            if Digest.of(folder / name) != self.files[name]:
                raise UsageError(f"{folder / name} is damaged: its SHA-256 is another; load an earlier checkpoint")


def find(path: Path) -> Path:
    """Where the checkpoint called `path` is. Raises UsageError when there is none."""
    for folder in (path, previous(path)):
        if (folder / MANIFEST).is_file():
            return folder
    hint = ", and latest_checkpoint(folder) finds the last of a folder" if path.is_dir() else ""
    what = f"has no {MANIFEST}" if path.exists() else "does not exist"
    raise UsageError(f"{path} is no checkpoint: it {what}; save_checkpoint writes one{hint}")


def verified(folder: Path, rank: int, ranks: int) -> Manifest:
    """The manifest of a checkpoint whose files have their sizes and, as far as they are the share of `rank` of so many,
    their digests; none of 0. Raises UsageError for what is damaged, or cannot be read.
    """
    manifest = Manifest.read(folder)
    try:
        manifest.require_sizes(folder)
        manifest.require_digests(folder, sorted(manifest.files)[rank::ranks] if ranks else ())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error}; load an earlier checkpoint") from error
    return manifest


def read_json(file: Path, content: Callable[[], Any], of: Callable[[Any], T]) -> T:
    """What `of` makes of the content of `file`, parsed where it is bytes. Raises UsageError where it cannot."""
    try:
        found = content()
        return of(json.loads(found) if isinstance(found, bytes) else found)
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise UsageError(f"{file} is damaged: {reason}; load an earlier checkpoint") from error


def whole_number(value: Any) -> int:
    """Raises ValueError for what is no int of 0 or more."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


def file_name(value: Any) -> str:
    """Raises ValueError for what does not name a file of the checkpoint's own folder."""
    if not isinstance(value, str) or value != Path(value).name or value in ("", "..") or "\0" in value:
        raise ValueError(f"{value!r} does not name a file of its folder")
    return value


def _mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}")
    return content


def _require_format(folder: Path, found: Any) -> None:
    if type(found) is int and found > FORMAT:
        raise UsageError(
            f"{folder} was written by a newer pipeflow: its format is {found}, this one reads {FORMAT}; update pipeflow"
        )
    if type(found) is not int or found != FORMAT:
        raise UsageError(f"{folder} is of format {found!r}, and this pipeflow reads {FORMAT}: load another checkpoint")


def _sha256(content: Mapping[str, Any]) -> str:
    """Of the same content always the same, however it is spaced."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
