"""Random models and layouts without a fault: pairs of runs that must be called alike."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.checked import dtensors, pipelines, replicas, sharded, split, stages
from benchmarks.checked.gpt import Sizes, plain
from pipeflow.checking import Result, check
from pipeflow.testing import run_processes

ENGINES: tuple[ModuleType, ...] = (replicas, split, stages, dtensors, sharded, pipelines)
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v")
TOGETHER = 10  # pairs of one start of processes


def sizes_of(seed: int) -> Sizes:
    """A random model and batch."""
    chosen = random.Random(seed)
    heads = chosen.choice((2, 4))
    return Sizes(
        words=chosen.choice((16, 32, 64)),
        width=heads * chosen.choice((4, 8, 12)),
        heads=heads,
        length=chosen.choice((4, 8, 16)),
        batch=chosen.choice((4, 8)),
        layers=4,
        dtype=chosen.choice((torch.float32, torch.bfloat16)),
        seed=seed,
    )


def rank_runs(engine: str, seeds: list[int], folder: str) -> None:
    """On each rank: records one run for each seed."""
    module = next(each for each in ENGINES if each.__name__ == engine)
    for seed in seeds:
        options = {"schedule": SCHEDULES[seed % len(SCHEDULES)]} if module is pipelines else {}
        sizes = replace(sizes_of(seed), tied=module in (stages, pipelines) and seed % 2 == 0)
        module.run(f"{folder}/{seed}", "", sizes, **options)


def pairs(engine: ModuleType, seeds: list[int], folder: Path) -> dict[int, Result]:
    """The comparisons of an engine's runs with plain ones."""
    tensor = 2 if engine is pipelines and seeds[0] % 2 else 1
    run_processes(rank_runs, 2 * tensor, engine.__name__, seeds, str(folder), tensor=tensor, deadline=300.0)
    found = {}
    for seed in seeds:
        sizes = replace(sizes_of(seed), tied=engine in (stages, pipelines) and seed % 2 == 0)
        found[seed] = check(plain(folder / f"plain-{seed}", sizes), folder / str(seed))
    return found
