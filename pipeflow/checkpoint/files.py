"""The folder of a checkpoint: it is written under a temporary name, and has its own only once it is complete. A
manifest lists its files with their sizes and digests. What must not live here: what the files hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeflow.core.errors import UsageError
from pipeflow.parallel.layout import Layout

FORMAT = 1  # raised when older versions could no longer read what is written
MANIFEST = "checkpoint.json"
_HIDDEN = re.compile(r"\.(?P<name>.+)\.((?P<process>\d+)-\w+\.(writing|completing)|previous)")


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file must be: its size and its SHA-256."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Digest:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(file.stat().st_size, digest)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is said of a checkpoint beside its tensors: the step, the layout that saved it, its files."""

    step: int
    layout: Layout
    files: Mapping[str, Digest]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        write_durably(folder / MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises UsageError for one that is damaged, or of a newer format."""
        file = folder / MANIFEST
        try:
            read = json.loads(file.read_bytes())
            if read["format"] > FORMAT:
                raise UsageError(
                    f"{folder} was written by a newer pipeflow: its format is {read['format']}, this one reads up to "
                    f"{FORMAT}; update pipeflow"
                )
            files = {name: Digest(**digest) for name, digest in read["files"].items()}
            return cls(read["step"], Layout(**read["layout"]), files, read["format"])
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"{file} is damaged: {error}; load an earlier checkpoint") from error


def temporary_for(path: Path) -> Path:
    """A fresh hidden name beside `path`, which says which process it belongs to."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.writing")


def claim(temporary: Path) -> Path | None:
    """The new name of a folder that is to be completed; None for all but the first that asks."""
    claimed = temporary.with_suffix(".completing")
    try:
        temporary.rename(claimed)
    except FileNotFoundError:
        return None
    return claimed


def discard(temporary: Path) -> None:
    """Removes what a failed save wrote."""
    for folder in (temporary, temporary.with_suffix(".completing")):
        shutil.rmtree(folder, ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes what saves that were cut short left in `folder`, other than this process's own, which may be under way;
    and puts back a checkpoint whose replacement did not come.
    """
    for leftover, found in _hidden(folder):
        path = folder / found["name"]
        if found["process"] is None and not path.exists():
            leftover.rename(path)
        elif found["process"] != str(os.getpid()):
            shutil.rmtree(leftover, ignore_errors=True)


def _hidden(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if found := _HIDDEN.fullmatch(path.name):
            yield path, found


def publish(temporary: Path, path: Path) -> None:
    """Gives a complete checkpoint its name. One that had it before stays until then, and `find` knows where."""
    sync_folder(temporary)
    previous = _previous(path)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    temporary.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def find(path: Path) -> Path:
    """Where the checkpoint called `path` is. Raises UsageError when there is none."""
    for folder in (path, _previous(path)):
        if (folder / MANIFEST).is_file():
            return folder
    hint = ", and latest_checkpoint(folder) finds the last of a folder" if path.is_dir() else ""
    what = f"has no {MANIFEST}" if path.exists() else "does not exist"
    raise UsageError(f"{path} is no checkpoint: it {what}; save_checkpoint writes one{hint}")


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the highest step; None when it has none that is complete."""
    return max(_complete(Path(folder)), default=(0, None), key=lambda each: each[0])[1]


def keep_newest(path: Path, keep: int) -> None:
    """Removes all checkpoints beside `path` but the `keep` - 1 of the highest steps."""
    others = [each for each in _complete(path.parent) if each[1] != path]
    for _, old in sorted(others, key=lambda each: each[0], reverse=True)[keep - 1 :]:
        gone = temporary_for(old)  # a removal that is cut short must not leave half a checkpoint
        find(old).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _complete(folder: Path) -> Iterator[tuple[int, Path]]:
    """The step and name of every checkpoint, those whose replacement was cut short among them."""
    paths = {path for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
    paths |= {folder / found["name"] for _, found in _hidden(folder) if found["process"] is None}
    for path in sorted(paths):
        with suppress(UsageError):
            yield Manifest.read(find(path)).step, path


def require_sound(folder: Path, files: Mapping[str, Digest], share: Iterable[str]) -> None:
    """Raises UsageError for the first file that is missing or not as long as it was written, or, among those of
    `share`, that holds other bytes.
    """
    for name, digest in files.items():
        file = folder / name
        if not file.is_file():
            raise UsageError(f"{file} is missing: the checkpoint is damaged; load an earlier one")
        if (size := file.stat().st_size) != digest.bytes:
            raise UsageError(
                f"{file} is damaged: it has {size} bytes, {digest.bytes} were written; load an earlier checkpoint"
            )
    for name in share:
        if Digest.of(folder / name) != files[name]:
            raise UsageError(f"{folder / name} is damaged: its SHA-256 is another; load an earlier checkpoint")


def write_durably(file: Path, content: bytes) -> None:
    """Writes `file` so that it is there whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(file)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
