"""The modules of examples/gpt3, as the scripts see each other: `gpt3.model`, `gpt3.data` and so on."""

from __future__ import annotations

import json
import os
import subprocess
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
        *("model", "build", "data", "webtext", "samples", "ranks", "check"),
        *("train", "hybrid", "megatron", "lab"),
    )
    sys.path.insert(0, str(GPT3))
    try:
        yield SimpleNamespace(path=GPT3, **{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(GPT3))
        for name in names:
            del sys.modules[name]


def run_script(script: str | Path, *options: str, ranks: int = 0, **variables: str) -> str:
    """What a script prints, of the example unless its path says where: it ends well, and says nothing else. With
    `ranks`, torchrun starts so many.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    paths = f"{GPT3.parents[1]}{os.pathsep}{GPT3}"
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(GPT3 / script), *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    return ended.stdout


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
