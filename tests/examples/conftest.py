"""The modules of examples/gpt3, as the scripts see each other: `gpt3.model`, `gpt3.data` and so on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

GPT3 = Path(__file__).parents[2] / "examples" / "gpt3"


@pytest.fixture(scope="session")
def gpt3() -> Iterator[Any]:
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    names = (
        *("model", "build", "data", "webtext", "mock", "ranks", "check"),
        *("train", "hybrid", "megatron", "lab"),
    )
    sys.path.insert(0, str(GPT3))
    try:
        yield SimpleNamespace(path=GPT3, **{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(GPT3))
        for name in names:
            del sys.modules[name]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where this test's caches go."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PIPEFLOW_CACHE", str(folder))
    monkeypatch.delenv("DATA", raising=False)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A user's file of 45 documents, each of its own words."""
    path = tmp_path / "mine.jsonl"
    write_text(path, [f"document {number} has the number {number} " * 20 for number in range(45)])
    return path


def write_text(path: Path, documents: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
