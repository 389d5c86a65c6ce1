"""Folders of checkpoints: each is written under a hidden name and renamed once it is complete. Must not contain: the
contents of the folder.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing

_PROCESS = secrets.token_hex(4)  # a process id may be used again later
_HIDDEN = re.compile(r"\.(?P<name>.+)\.((?P<sequence>\d+)-(?P<process>\w+)-\w+\.(writing|completing)|previous)")
_FAILED = "failed"


def path_of(path: object) -> Path:
    """The path of a checkpoint. Raises UsageError for anything else, such as a model."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"the path of a checkpoint comes first, got {type(path).__name__}: pass path, then model")
    return Path(path)


def temporary_for(path: Path, sequence: int) -> Path:
    """A new hidden name beside `path` that contains an id of this process."""
    return path.with_name(f".{path.name}.{sequence}-{_PROCESS}-{secrets.token_hex(4)}.writing")


def claim(temporary: Path) -> Path | None:
    """Claims the folder for completion. Returns its new name to the first caller, None to all others."""
    claimed = temporary.with_suffix(".completing")
    try:
        temporary.rename(claimed)
    except FileNotFoundError:
        return None
    return claimed


def mark_failed(temporary: Path) -> None:
    """Marks a failed save, so that the next `clean` removes its folder."""
    for folder in (temporary, temporary.with_suffix(".completing")):
        with suppress(OSError):
            (folder / _FAILED).touch()


def discard(temporary: Path) -> None:
    """Removes the folder of a failed save."""
    for folder in (temporary, temporary.with_suffix(".completing")):
        remove(folder)


def remove(path: Path) -> None:
    """Removes a folder, or a link to one; ignores errors."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes what failed or killed saves left in `folder`, and restores a checkpoint whose replacement was cut short.
    Folders of this process stay, since their saves may be running.
    """
    for leftover, found in hidden(folder):
        path = folder / found["name"]
        if found["process"] is None and not path.exists():
            leftover.rename(path)
        elif found["process"] != _PROCESS or (leftover / _FAILED).exists():
            remove(leftover)


def hidden(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """The hidden folders of saves in `folder`, with the "name", "sequence" and "process" of each."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if found := _HIDDEN.fullmatch(path.name):
            yield path, found


def publish(temporary: Path, path: Path) -> None:
    """Renames a complete checkpoint to `path`. The one at `path` before is kept as `previous(path)` until then."""
    sync_folder(temporary)
    if path.exists() or path.is_symlink():
        remove(previous(path))
        path.rename(previous(path))
    temporary.rename(path)
    sync_folder(path.parent)
    remove(previous(path))


def previous(path: Path) -> Path:
    """The name of the old checkpoint at `path` while a new one replaces it."""
    return path.with_name(f".{path.name}.previous")


def write_durably(file: Path, content: bytes) -> None:
    """Writes `file` atomically: it has all of its content or does not exist."""
    with replacing(file) as temporary, temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes the names in `folder` to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
