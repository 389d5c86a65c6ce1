"""Files that are no texts: each is one sentence, and none is read without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.core.files import read_text


def test_a_pipe_or_a_device_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(UsageError, match=f"{name}: this is no file, but a pipe or a device"):
            read_text(tmp_path / name)
    with pytest.raises(UsageError, match="Is a directory"):
        read_text(tmp_path)


def test_a_text_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\r\n" + b"x" * (2**20 - 8))
    assert read_text(path, 2**20).startswith("one\nxx")
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(UsageError, match="this has more than 1 MiB"):
        read_text(path, 2**20)
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(UsageError, match="this has more than 256 MiB"):
        read_text(path)
