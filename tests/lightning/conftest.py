"""Fixtures for tests of Lightning's strategies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeflow.engine.parallel.context import context_if_launched


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A world of one process, whose context is closed at the end, in an empty folder."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    context = context_if_launched()
    if context is not None:
        context.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
