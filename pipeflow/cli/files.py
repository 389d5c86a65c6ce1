"""Files that the command writes: all of them or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack

from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing
from pipeflow.core.text import printable

STANDARD_OUTPUT = "-"


def write(texts: Mapping[str, str]) -> None:
    """Writes each text to its path, all of them or none, and reports the files on standard error. The path `-` is
    standard output. An existing file is replaced in one step. Raises UsageError for a path that cannot be written.
    """
    paths = [path for path in texts if path != STANDARD_OUTPUT]
    try:
        with ExitStack() as files:
            for path in paths:
                if _is_replaced(path):
                    files.enter_context(replacing(path)).write_text(texts[path], encoding="utf-8")
        for path in paths:
            if not _is_replaced(path):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(texts[path])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    for path in paths:
        print(f"wrote {printable(path)}", file=sys.stderr)
    sys.stdout.writelines(texts.get(STANDARD_OUTPUT, "").splitlines(keepends=True))


def _is_replaced(path: str) -> bool:
    """False for a device or a pipe, into which the text is written. Raises OSError for a path that cannot be written,
    although a rename could replace it.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(0, "Is a directory")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionError(0, "Permission denied")
    return os.path.isfile(path) or not os.path.exists(path)
