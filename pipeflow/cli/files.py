"""Files that the command reads and writes. A file is written completely or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pipeflow.core.errors import UsageError
from pipeflow.core.text import printable

STANDARD_OUTPUT = "-"


def read(path: str) -> str:
    """The text of a file. Raises UsageError if it cannot be read; if there is no such file, the message suggests the
    nearest name.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        near = _near(path) if isinstance(error, FileNotFoundError) else None
        hint = f"; did you mean {near}?" if near else ""
        raise UsageError(f"{path}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file") from None


def _near(path: str) -> str | None:
    from difflib import get_close_matches

    folder, name = os.path.split(path)
    try:
        names = get_close_matches(name, os.listdir(folder or "."), n=1)
    except OSError:
        return None
    return os.path.join(folder, names[0]) if names else None


def write(texts: Mapping[str, str]) -> None:
    """Writes each text to its path, all of them or none, and reports the files on standard error. The path `-` is
    standard output. An existing file is replaced in one step. Raises UsageError for a path that cannot be written.
    """
    staged: dict[str, str] = {}
    try:
        for path, text in texts.items():
            if path != STANDARD_OUTPUT:
                staged[path] = _stage(path, text)
        for path, temporary in staged.items():
            if temporary:
                os.replace(temporary, os.path.realpath(path))
            else:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(texts[path])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    finally:
        for temporary in filter(None, staged.values()):
            if os.path.exists(temporary):
                os.remove(temporary)
    for path in staged:
        print(f"wrote {printable(path)}", file=sys.stderr)
    sys.stdout.writelines(texts.get(STANDARD_OUTPUT, "").splitlines(keepends=True))


def _stage(path: str, text: str) -> str:
    """Writes the text to a temporary file beside `path`, and returns its name; empty for a device or a pipe, to which
    nothing is written yet.
    """
    real = os.path.realpath(path)
    if os.path.isdir(real):
        raise IsADirectoryError(0, "Is a directory")
    if os.path.exists(real) and not os.access(real, os.W_OK):
        raise PermissionError(0, "Permission denied")
    if os.path.exists(real) and not os.path.isfile(real):
        return ""
    temporary = f"{real}.{os.getpid()}.part"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    return temporary
