"""Files: read as text, and written whole or not at all. Must not contain: what is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeflow.core.errors import UsageError, closest


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file. Raises UsageError if it cannot be read; if there is no such file, the message suggests the
    nearest name.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        near = _near(path) if isinstance(error, FileNotFoundError) else None
        hint = f"; did you mean {near}?" if near else ""
        raise UsageError(f"{os.fspath(path)}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{os.fspath(path)}: not a text file") from None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that yields a temporary path beside `path`. What the block writes there replaces the file at
    `path` in one step when the block ends. If the block raises an error, the file stays as it was. Raises OSError.
    """
    real = Path(os.path.realpath(path))
    temporary = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(real)
    finally:
        temporary.unlink(missing_ok=True)


def _near(path: str | os.PathLike[str]) -> str | None:
    folder, name = os.path.split(path)
    try:
        near = closest(name, os.listdir(folder or "."))
    except OSError:
        return None
    return near and os.path.join(folder, near)
