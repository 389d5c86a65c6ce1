"""Comparing two recordings of a model of a billion parameters, one step on 8 ranks (4 stages x 2 tensor ranks): seconds
and peak memory of `pipeflow check`. The files are written here, with the events that such a job leaves and random
sketches that fit each other: training it is not what is measured.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report
from pipeflow.checking.files import FORMAT, file_of, line_of

WIDTH, LAYERS, WORDS, SAMPLES, TOKENS = 2048, 18, 32000, 64, 2048
STAGES, TENSOR, MICROBATCHES = 4, 2, 16
COLUMNS = ["parameters", "files MB", "seconds", "memory GB", "result"]
Array = Any


def parameters() -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Names, shapes, and the dimension that tensor ranks divide."""
    yield "embed.weight", (WORDS, WIDTH), 0
    for layer in range(LAYERS):
        for name in "qkv":
            yield f"layers.{layer}.attention.{name}.weight", (WIDTH, WIDTH), 0
        yield f"layers.{layer}.attention.o.weight", (WIDTH, WIDTH), 1
        yield f"layers.{layer}.up.weight", (4 * WIDTH, WIDTH), 0
        yield f"layers.{layer}.down.weight", (WIDTH, 4 * WIDTH), 1
        for name in ("norm1", "norm2"):
            yield f"layers.{layer}.{name}.weight", (WIDTH,), None
    yield "norm.weight", (WIDTH,), None
    yield "head.weight", (WORDS, WIDTH), 0


def modules() -> Iterator[tuple[str, int, bool]]:
    """Names in the order of the forward, widths, and whether tensor ranks divide their outputs."""
    yield "embed", WIDTH, False
    for layer in range(LAYERS):
        yield f"layers.{layer}.norm1", WIDTH, False
        yield from ((f"layers.{layer}.attention.{name}", WIDTH, True) for name in "qkv")
        yield from ((f"layers.{layer}.{name}", WIDTH, False) for name in ("attention.o", "attention", "norm2"))
        yield f"layers.{layer}.up", 4 * WIDTH, True
        yield f"layers.{layer}.act", 4 * WIDTH, False
        yield from ((f"layers.{layer}.{name}".rstrip("."), WIDTH, False) for name in ("down", ""))
    yield "norm", WIDTH, False
    yield "head", WORDS, True


def stage_of(name: str) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) * STAGES // LAYERS
    return 0 if name.startswith("embed") else STAGES - 1


class Files:
    """The files of a run.

    Args:
        folder: where they go.
        world: 1 for the plain run.
    """

    def __init__(self, folder: Path, world: int) -> None:
        folder.mkdir()
        self.files = [file_of(folder, rank).open("w", encoding="utf-8") for rank in range(world)]
        self.world = world
        named = [(name, width) for name, width, _ in modules()]
        for rank, file in enumerate(self.files):
            tensors = [self._info(rank, *each) for each in parameters() if rank in self.ranks(each[0])]
            told = [{"name": name, "type": "Module", "leaf": True, "drops": False} for name, _ in named]
            start = {"format": FORMAT, "rank": rank, "world": world, "tensors": tensors, "modules": told}
            file.write(line_of({"kind": "start", "step": 0, **start, "groups": {}, "random": ""}, {}))

    def ranks(self, name: str) -> list[int]:
        """The ranks that have a module or tensor."""
        first = stage_of(name) * TENSOR
        return [0] if self.world == 1 else [first + rank for rank in range(TENSOR)]

    def _info(self, rank: int, name: str, shape: tuple[int, ...], dim: int | None) -> dict[str, object]:
        own, offset = list(shape), [0] * len(shape)
        if dim is not None and self.world > 1:
            own[dim] //= TENSOR
            offset[dim] = rank % TENSOR * own[dim]
        same = {"same": hash(name), "parameter": True, "stage": None, "dtype": "torch.float32"}
        return {"name": name, "shape": shape, "offsets": [(offset, own)], **same}

    def event(self, rank: int, kind: str, told: dict[str, object], **arrays: Array) -> None:
        self.files[rank].write(line_of({"kind": kind, "step": 0, **told}, arrays))

    def close(self) -> None:
        for rank, file in enumerate(self.files):
            self.event(rank, "stepped", {"random": ""})
            self.event(rank, "end", {})
            file.close()


def write(folder: Path, world: int) -> None:
    """The files of a run of one step."""
    files, random = Files(folder, world), np.random.default_rng(0)
    for kind in ("before", "gradient", "after"):
        for name, _, dim in parameters():
            whole = random.normal(size=9) ** 2
            ranks = files.ranks(name)
            for rank in ranks:
                share = 1 / len(ranks) if dim is not None else 1.0
                told: dict[str, object] = {"name": name, "dtype": "torch.float32"}
                files.event(rank, kind, told, sketch=whole * share)
    for name, width, divided in modules():
        rows, ranks = random.normal(size=(SAMPLES, 9)) ** 2, files.ranks(name)
        for call in range(MICROBATCHES if world > 1 else 1):
            mine = rows if world == 1 else rows[call::MICROBATCHES]
            for place, rank in enumerate(ranks):
                parts = TENSOR if divided and world > 1 else 1
                begin = [0, place * width // TENSOR if parts > 1 else 0]
                shape = [len(mine), TOKENS, width // parts]
                told = {"module": name, "call": call, "place": 0, "dtype": "torch.float32"}
                more = {"shape": shape, "begin": begin, "known": True, "whole": [len(mine), TOKENS, width]}
                files.event(rank, "output", told | more, rows=mine / parts)
    files.close()


def run(rounds: int | None = None) -> Report:
    report = Report("checking_large", "pipeflow check: a billion parameters, one step, 8 ranks", COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        plain, parallel = Path(folder, "plain"), Path(folder, "parallel")
        write(plain, 1)
        write(parallel, STAGES * TENSOR)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.jsonl"))
        start = time.perf_counter()
        command = [sys.executable, "-m", "pipeflow", "check", str(plain), str(parallel)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    count = sum(int(np.prod(shape)) for _, shape, _ in parameters())
    said = " ".join((done.stdout or done.stderr).split())
    report.rows.append(
        [f"{count / 1e9:.2f} billion", f"{size / 1e6:.1f}", f"{seconds:.1f}", f"{memory:.2f}", said.partition(",")[0]]
    )
    report.notes.append("target: 60 s, 4 GB")
    report.data = {"seconds": seconds, "gigabytes": memory, "said": said}
    return report
