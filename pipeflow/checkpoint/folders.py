"""The folder of a checkpoint: it is written under a hidden name, and has its own only once it is complete. What must
not live here: what the folder holds.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROCESS = secrets.token_hex(4)  # a process id may be that of an earlier life
_HIDDEN = re.compile(r"\.(?P<name>.+)\.((?P<sequence>\d+)-(?P<process>\w+)-\w+\.(writing|completing)|previous)")
_FAILED = "failed"


def temporary_for(path: Path, sequence: int) -> Path:
    """A fresh hidden name beside `path`, which says which process it belongs to."""
    return path.with_name(f".{path.name}.{sequence}-{_PROCESS}-{secrets.token_hex(4)}.writing")


def claim(temporary: Path) -> Path | None:
    """The new name of a folder that is to be completed; None for all but the first that asks."""
    claimed = temporary.with_suffix(".completing")
    try:
        temporary.rename(claimed)
    except FileNotFoundError:
        return None
    return claimed


def mark_failed(temporary: Path) -> None:
    """Lets the next `clean` remove what a failed save wrote."""
    for folder in (temporary, temporary.with_suffix(".completing")):
        with suppress(OSError):
            (folder / _FAILED).touch()


def discard(temporary: Path) -> None:
    """Removes what a failed save wrote."""
    for folder in (temporary, temporary.with_suffix(".completing")):
        remove(folder)


def remove(path: Path) -> None:
    """Removes a folder, or a link to one, as far as that is possible."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes what saves that failed or were cut short left in `folder`, but not this process's own, which may be under
    way; and puts back a checkpoint whose replacement did not come.
    """
    for leftover, found in hidden(folder):
        path = folder / found["name"]
        if found["process"] is None and not path.exists():
            leftover.rename(path)
        elif found["process"] != _PROCESS or (leftover / _FAILED).exists():
            remove(leftover)


def hidden(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """What saves left or are writing in `folder`, with the "name", "sequence" and "process" of each."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if found := _HIDDEN.fullmatch(path.name):
            yield path, found


def publish(temporary: Path, path: Path) -> None:
    """Gives a complete checkpoint its name. What had it before stays until then, under the name `previous(path)`."""
    sync_folder(temporary)
    if path.exists() or path.is_symlink():
        remove(previous(path))
        path.rename(previous(path))
    temporary.rename(path)
    sync_folder(path.parent)
    remove(previous(path))


def previous(path: Path) -> Path:
    """What the checkpoint called `path` is called while another takes its place."""
    return path.with_name(f".{path.name}.previous")


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
