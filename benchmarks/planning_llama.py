"""What planning costs that makes no weights: a LLaMA of 70 billion parameters in 8 stages, in a fresh process."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import Any

from benchmarks.processes import run_ranks
from benchmarks.report import Report

STAGES, LENGTH = 8, 4096
LLAMA_70B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
PHASES = ("import", "skeleton", "plan", "stage", "another length")


def run(rounds: int | None = None) -> Report:
    found: list[dict[str, Any]] = []
    for _ in range(rounds or 5):
        found += run_ranks("planning_llama:planned", 1, {}, deadline=300.0)
    title = f"planning_llama: {found[0]['parameters'] / 1e9:.1f} billion parameters in {STAGES} stages"
    report = Report("planning_llama", title, ["", "median s", "slowest s", "median CPU s"], data={"rounds": found})
    for label, phases in [*((phase, (phase,)) for phase in PHASES), ("skeleton, plan and stage", PHASES[1:4])]:
        took, used = (
            [sum(each[kind][phase] for phase in phases) for each in found] for kind in ("seconds", "cpu_seconds")
        )
        row = statistics.median(took), max(took), statistics.median(used)
        report.rows.append([label, *(f"{value:.2f}" for value in row)])
    peak = max(each["peak_bytes"] for each in found)
    report.notes += [
        f"peak memory of the process: {peak / 1e6:.0f} MB, of which {found[0]['imported_bytes'] / 1e6:.0f} MB are "
        "torch and transformers",
        f"microbatches of 1 x {LENGTH}; stage: the last one's copy of the module; another length: a plan for other "
        "shapes, which a step makes when they first come",
        "target: 10 s and less than 1 GB",
    ]
    return report


def planned() -> dict[str, Any]:
    """Plans in this process; returns the seconds of each phase and the memory."""
    clock = _Clock()
    import torch
    import transformers

    from pipeflow.adapters.huggingface.skeleton import Blueprint
    from pipeflow.engine.stages.planner import Planner
    from pipeflow.engine.stages.stage import ModuleStage

    blueprint = Blueprint(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA_70B), torch.bfloat16)
    imported = _peak()
    clock.lap("import")
    skeleton = blueprint.skeleton().train()
    clock.lap("skeleton")
    planner = Planner(skeleton, STAGES)
    plan = planner.plan(_entries(LENGTH))
    clock.lap("plan")
    stage = ModuleStage(skeleton, STAGES - 1, planner, plan, torch.device("cpu"))
    clock.lap("stage")
    planner.plan(_entries(LENGTH // 2))
    clock.lap("another length")
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    assert 0 < sum(parameter.numel() for parameter in stage.parameters()) < parameters
    return {
        "seconds": clock.seconds,
        "cpu_seconds": clock.cpu_seconds,
        "peak_bytes": _peak(),
        "imported_bytes": imported,
        "parameters": parameters,
        "sent_bytes": plan.sent_bytes,
    }


def _entries(length: int) -> dict[str, Any]:
    import torch

    words = torch.zeros(1, length, dtype=torch.long)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def _peak() -> int:
    """Of this process so far; Linux counts kilobytes, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Clock:
    """The seconds between its laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._last = time.perf_counter(), time.process_time()

    def lap(self, phase: str) -> None:
        now = time.perf_counter(), time.process_time()
        self.seconds[phase], self.cpu_seconds[phase] = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
