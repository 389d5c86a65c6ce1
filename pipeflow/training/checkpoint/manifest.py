"""The manifest of a checkpoint: the step, the order of saving, the layout, and every file with its size and digest. It
contains a digest of itself, so damage to it is detected too. It protects against accidents, not against forgery. It is
JSON that is checked in full when it is read, so nothing in it can run code or point outside the checkpoint.

Also the checkpoints in a folder, in the order of their manifests, and which of them are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.grid import Grid
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.training.checkpoint import folders
from pipeflow.training.checkpoint.folders import INDEX, MANIFEST, is_checkpoint, previous, write_durably

FORMAT = 2  # increased when older versions could not read the new format
_LATER = ("context", "experts", "depth")  # sizes of a layout that older files lack
T = TypeVar("T")
LOG = logging.getLogger("pipeflow")
LEFT_OUT = "checkpoint %s is skipped: %s"


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
        step, layout = content["step"], {**dict.fromkeys(_LATER, 1), **content["layout"]}
        sizes = {name: whole_number(layout[name]) for name in ("pipeline", "tensor", "data", *_LATER)}
        grid = None if layout.get("grid") is None else Grid(*(whole_number(size) for size in layout["grid"].values()))
        files = {file_name(name): Digest.read(digest) for name, digest in content["files"].items()}
        if INDEX not in files:
            raise ValueError(f"it does not list {INDEX}")
        return cls(
            None if step is None else whole_number(step),
            whole_number(content["sequence"]),
            WorldLayout(**sizes, grid=grid),
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


def keep_newest(path: Path, keep: int) -> None:
    """Removes old checkpoints beside `path`. Keeps the `keep` that were begun last, those that links in the folder
    point to, and those in which somebody else has put something. Raises OSError.
    """
    linked = {os.path.realpath(each) for each in path.parent.iterdir() if each.is_symlink()}
    for old, _ in saved_in_order(path.parent)[:-keep]:
        if os.path.realpath(old) in linked:
            continue
        try:
            if is_checkpoint(found := find(old)):
                folders.put_away(found, old)
        except (UsageError, FileNotFoundError):
            continue  # another save removes it, too
        except OSError as error:
            LOG.warning("checkpoint %s cannot be removed: %s", old, error)


def next_sequence(folder: Path) -> int:
    """A sequence number larger than that of any checkpoint in `folder`, including those being written."""
    complete = [manifest.sequence for _, manifest in saved_in_order(folder)]
    return 1 + max([*complete, *(int(found["sequence"] or 0) for _, found in folders.hidden(folder))], default=0)


def saved_in_order(folder: Path, *, warn: bool = False) -> list[tuple[Path, Manifest]]:
    """All checkpoints whose manifest can be read, in the order of saving."""
    found = []
    for path in sorted(_paths(folder)):
        try:
            found.append((path, Manifest.read(find(path))))
        except UsageError as error:
            if warn:
                LOG.warning(LEFT_OUT, path, error)
    return sorted(found, key=lambda each: each[1].sequence)


def _paths(folder: Path) -> Iterator[Path]:
    """Paths of the checkpoints in `folder`, without links. Includes those whose replacement was cut short."""
    there = {path for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
    there |= {folder / found["name"] for _, found in folders.hidden(folder) if found["process"] is None}
    for path in there:
        if not path.is_symlink() and any((each / MANIFEST).is_file() for each in (path, previous(path))):
            yield path
