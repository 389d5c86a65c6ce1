"""Folders of checkpoints: each is written under a hidden name and renamed once it is complete. Locks of the operating
system, which end with the process that holds them, say who is writing; names say which files a save writes. Nothing
that a save did not write is replaced or removed. Must not contain: the contents of files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing

MANIFEST = "checkpoint.json"
INDEX = "index.json"
TORCHS = ".metadata"  # the index as torch.distributed.checkpoint reads it
_JSON = r"checkpoint\.json|index\.json|\.metadata|part-\d+"
_OWN = re.compile(rf"__\d+_0\.distcp|{_JSON}|\.({_JSON})\.\w+\.part")
WEIGHTS = re.compile(r"model\.safetensors(\.index\.json)?|model-\d{5}-of-\d{5}\.safetensors")
_PARTS = re.compile(rf"part-\d+-\d+\.safetensors|{WEIGHTS.pattern}")


def data_file(rank: int) -> str:
    """The name of the file with a rank's data, as torch.distributed.checkpoint calls it."""
    return f"__{rank}_0.distcp"


def part_file(rank: int) -> str:
    """The name of the file that says, during a save, what a rank has written."""
    return f"part-{rank}"


def own_files(folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """The files in `folder` that a save writes to a checkpoint, or to its `hidden` folder. Raises OSError."""
    for path in folder.iterdir():
        is_own = _OWN.fullmatch(path.name) or (hidden and _PARTS.fullmatch(path.name))
        if is_own and path.is_file() and not path.is_symlink():
            yield path


def stranger_in(folder: Path, *, hidden: bool = False) -> str | None:
    """The name of an entry of `folder` that is not among `own_files`; None if there is none. Raises OSError."""
    own = {path.name for path in own_files(folder, hidden=hidden)}
    return min((path.name for path in folder.iterdir() if path.name not in own), default=None)


def is_checkpoint(folder: Path) -> bool:
    """True if `folder` is a checkpoint, whole or damaged, in which nobody has put anything. Raises OSError."""
    if folder.is_symlink() or not folder.is_dir() or stranger_in(folder) is not None:
        return False
    names = {path.name for path in own_files(folder)}
    return MANIFEST in names and len(names) > 1


_PATIENCE = 20.0  # seconds, after which the holder of a lock counts as stopped
_QUIET = 3600.0  # seconds without a write, after which a save of another machine counts as dead


def _machine() -> str:
    """A name of the running kernel, within which locks on folders are exact: file systems of a network may not share
    them between machines.
    """
    try:
        told = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        told = str(uuid.getnode())
    return hashlib.sha256(told.encode()).hexdigest()[:8]


_MACHINE = _machine()
PROCESS = _MACHINE + secrets.token_hex(4)  # a process id may be used again later


class Hold:
    """Marks a folder as being written by this process, until `release`, or until this object or the process is gone.
    Several ranks may hold one folder. Raises OSError if there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        _locks(descriptor, fcntl.LOCK_SH)
        self.release = weakref.finalize(self, _close, descriptor, os.getpid())


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Context manager that lets one process at a time run its block for a folder. Where the file system has no locks,
    or their holder is stopped, the block runs all the same. Raises OSError if there is no folder.
    """
    descriptor, end = os.open(folder, os.O_RDONLY), time.monotonic() + _PATIENCE
    try:
        while not _locks(descriptor, fcntl.LOCK_EX) and time.monotonic() < end:
            time.sleep(0.01)
        yield
    finally:
        _close(descriptor, os.getpid())


@contextmanager
def taken(folder: Path, process: str, now: float) -> Iterator[bool]:
    """Context manager that yields True if nobody writes the hidden `folder` any more; nobody can hold it meanwhile.

    Args:
        folder: the folder.
        process: `PROCESS` of the process that made it.
        now: the file system's time, in seconds.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        if process.startswith(_MACHINE):
            yield _locks(descriptor, fcntl.LOCK_EX, otherwise=_is_quiet(folder, now))
        else:
            yield _is_quiet(folder, now)
    finally:
        _close(descriptor, os.getpid())


def _is_quiet(folder: Path, now: float) -> bool:
    try:
        written = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    except OSError:
        return False
    return now - max(written) > _QUIET


def _locks(descriptor: int, kind: int, *, otherwise: bool = True) -> bool:
    """True if the lock was taken now, `otherwise` if the file system has none. Forked processes share it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return otherwise
    return True


def _close(descriptor: int, process: int) -> None:
    if process == os.getpid():  # one that was forked has the same lock
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


_HIDDEN = re.compile(r"\.(?P<name>.+)\.((?P<sequence>\d+)-(?P<process>\w+)-\w+\.(writing|completing)|previous)")
_LONGEST = 180  # bytes of a name; hidden names beside it are longer, and file systems allow 255


def path_of(path: object) -> Path:
    """The path of a checkpoint. Raises UsageError for anything else, such as a model."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"the path of a checkpoint comes first, got {type(path).__name__}: pass path, then model")
    if not os.fspath(path) or "\0" in str(path):
        raise UsageError(f"{os.fspath(path)!r} is not a path: pass the folder of a checkpoint, such as 'run/step-1'")
    return Path(path)


def require_name(path: Path) -> None:
    """Raises UsageError for a path that ends in no name, or in one too long for the hidden names beside it."""
    if path.name in ("", ".."):
        raise UsageError(
            f"a checkpoint needs a name in its folder, such as {str(path / 'step-1')!r}; got {str(path)!r}"
        )
    if len(os.fsencode(path.name)) > _LONGEST:
        raise UsageError(f"the name of a checkpoint has at most {_LONGEST} bytes, got {path.name!r}: shorten it")


def require_free(path: Path) -> None:
    """Raises UsageError unless a checkpoint may be saved at `path`: where nothing is, an empty folder, or a checkpoint
    in which nobody has put anything. Raises OSError if it cannot be seen.
    """
    for place in (path, previous(path)):
        if (what := _in_the_way(place)) is not None:
            raise UsageError(f"{place} {what}, and only a checkpoint is replaced by another: save to a new folder")


def _in_the_way(path: Path) -> str | None:
    """What is at `path`, if it is neither a checkpoint, nor an empty folder, nor nothing."""
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}"
    if not path.exists():
        return None
    if not path.is_dir():
        return "is a file"
    if is_checkpoint(path) or not any(path.iterdir()):
        return None
    stranger = stranger_in(path)
    return "is a folder without a manifest" if stranger is None else f"is a folder with {stranger!r} in it"


def temporary_for(path: Path, sequence: int) -> Path:
    """A new hidden name beside `path` that contains an id of this process."""
    return path.with_name(f".{path.name}.{sequence}-{PROCESS}-{secrets.token_hex(4)}.writing")


def begin(path: Path, number: Callable[[Path], int] = lambda _: 0) -> tuple[Path, Hold, int]:
    """Makes a hidden folder for a save to `path`: its path, this process's hold of it, and what `number` returns for
    the folder of `path` while no other process begins. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.parent):
        sequence = number(path.parent)
        temporary = temporary_for(path, sequence)
        temporary.mkdir()  # from now on other saves see the sequence number
        return temporary, Hold(temporary), sequence


def join(temporary: Path) -> Hold:
    """Another rank's hold of the hidden folder that `begin` made. Raises OSError."""
    temporary.mkdir(exist_ok=True)  # a network file system may not show it yet
    return Hold(temporary)


def claim(temporary: Path) -> Path | None:
    """Claims the folder for completion. Returns its new name to the first caller, None to all others."""
    claimed = temporary.with_suffix(".completing")
    try:
        temporary.rename(claimed)
    except FileNotFoundError:
        return None
    return claimed


def discard(temporary: Path) -> None:
    """Removes the folder of a failed save, unless other ranks still write it: then the next save does."""
    for folder in (temporary, temporary.with_suffix(".completing")):
        with taken(folder, PROCESS, 0.0) as is_mine:
            if is_mine:
                remove(folder)


def remove(folder: Path) -> None:
    """Removes the files that a save wrote, and the folder if it is then empty; ignores errors."""
    with suppress(OSError):
        for file in list(own_files(folder, hidden=True)):
            file.unlink()
        folder.rmdir()


def clean(folder: Path, now: float) -> None:
    """Removes what failed or killed saves left in `folder`, and restores a checkpoint whose replacement was cut short.
    What a living process writes stays. `now` is the file system's time. Raises OSError.
    """
    with alone(folder):
        for leftover, found in list(hidden(folder)):
            if found["process"] is None:
                _settle(leftover, folder / found["name"])
            else:
                with taken(leftover, found["process"], now) as is_left:
                    if is_left and stranger_in(leftover, hidden=True) is None:
                        put_away(leftover, folder / found["name"])


def _settle(leftover: Path, path: Path) -> None:
    """Ends a replacement of the checkpoint at `path` that was cut short."""
    if is_checkpoint(leftover):
        if path.exists():
            put_away(leftover, path)
        else:
            leftover.rename(path)


def put_away(path: Path, name: Path) -> None:
    """Removes a checkpoint or the folder of a save, called `name`. It first gets a hidden name, so nobody ever finds a
    half of it. Raises OSError if it cannot be renamed.
    """
    gone = temporary_for(name, 0)
    path.rename(gone)
    remove(gone)


def hidden(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """The hidden folders of saves in `folder`, with the "name", "sequence" and "process" of each."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if (found := _HIDDEN.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
            yield path, found


def publish(temporary: Path, path: Path) -> None:
    """Renames a complete checkpoint to `path`. The one at `path` before is kept as `previous(path)` until then, and
    goes with the next `clean`. Raises OSError, and UsageError as `require_free` does; `path` is then as it was.
    """
    sync_folder(temporary)
    with alone(path.parent):
        require_free(path)
        if not is_checkpoint(path):
            temporary.rename(path)  # which replaces an empty folder
            return
        _settle(previous(path), path)
        path.rename(previous(path))
        try:
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                previous(path).rename(path)
            raise


def published(path: Path) -> None:
    """Makes the name of a published checkpoint durable, and removes the one it replaced. Raises OSError."""
    sync_folder(path.parent)
    with alone(path.parent):
        _settle(previous(path), path)


def previous(path: Path) -> Path:
    """The name of the old checkpoint at `path` while a new one replaces it."""
    return path.with_name(f".{path.name}.previous") if path.name else path


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
