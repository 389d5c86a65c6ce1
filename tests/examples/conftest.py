"""What tests of the examples share: their scripts run as a user runs them, and texts for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT3 = EXAMPLES / "gpt3"


collect_ignore_glob = [] if find_spec("tokenizers") else ["test_*.py"]


def run_script(script: str, *options: str, **variables: str) -> str:
    """What a script of the examples prints: it starts its own ranks, ends well, and says nothing else."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(EXAMPLES / script), *options]
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


def kept_numbers(forward: Callable[..., object], *inputs: object, **named: object) -> int:
    """How many numbers a forward keeps for its backward."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(*inputs, **named)
    return kept


def write_text(path: Path, documents: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
