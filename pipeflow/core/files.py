"""Files: read as text, and written whole or not at all; and JSON from elsewhere, read value by value. Must not contain:
what is in them.
"""

from __future__ import annotations

import io
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pipeflow.core.errors import UsageError, closest

LARGEST_TEXT = 2**28  # bytes


def read_text(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> str:
    """The text of a file of at most `most` bytes. Raises UsageError if it cannot be read; if there is no such file, the
    message suggests the nearest name.
    """
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UsageError(f"{os.fspath(path)}: this has more than {most >> 20} MiB, which is no file for this command")
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        raise UsageError(f"{os.fspath(path)}: not a text file") from None


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context manager that yields a file to read bytes from. Raises UsageError if it cannot be read, or is a pipe or a
    device, which may have no end.
    """
    try:
        if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
            raise UsageError(f"{os.fspath(path)}: this is no file, but a pipe or a device: write it into a file first")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: str | os.PathLike[str], error: OSError) -> UsageError:
    """The error for a file that cannot be read. If there is no such file, it suggests the nearest name."""
    near = _near(path) if isinstance(error, FileNotFoundError) else None
    return UsageError(f"{os.fspath(path)}: {error.strerror}{f'; did you mean {near}?' if near else ''}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that yields a temporary path beside `path`. What the block writes there replaces the file at
    `path` in one step when the block ends. If the block raises an error, the file stays as it was. Raises OSError.
    """
    real = Path(os.path.realpath(path))
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(4)}.part")
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


def parse(text: str) -> Any:
    """The value of a JSON text. Raises UsageError if it is none."""
    import json  # most commands and programs read none

    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is not JSON: {error}") from None


def is_number(value: object) -> bool:
    """True for a finite number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: object, what: str) -> float:
    """The finite number `what`. Raises UsageError for another value."""
    if not is_number(value):
        raise UsageError(f"{what} must be a finite number, got {value!r}")
    assert isinstance(value, int | float)
    return float(value)
