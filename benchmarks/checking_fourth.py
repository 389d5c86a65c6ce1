"""`pipeflow check` on a fourth set of faults: of functions between modules, numbers and moments of optimizers, divisors
of losses, and scalars. They were written, with what must be said of each, before the code had seen any. The code was
changed with the cases of even numbers at hand; those of odd numbers judge it. Jobs without a fault come first.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checked import between
from benchmarks.report import Report
from pipeflow.checking import Result, check
from pipeflow.testing import run_processes

COLUMNS = ["case", "fault", "engine", "first", "place", "cause", "right"]
ATTENTION, FEED = "layers.1.attention", "layers.1.feed"


@dataclass(frozen=True)
class Fault:
    """A fault in a job, the places that are right, (what, module), and the causes that are right."""

    engine: str
    kind: str
    fault: str
    places: tuple[tuple[str, str], ...]
    causes: tuple[str, ...]


def _steps(module: str) -> tuple[tuple[str, str], ...]:
    return ("optimizer", module), ("update", module)


OF_ATTENTION = (("function", f"{ATTENTION}: scaled_dot_product_attention #1"),)
OF_SCORES = (("function", f"{ATTENTION}: masked_fill #1"), ("function", f"{ATTENTION}: softmax #1"))
OF_GATE = (("function", f"{FEED}: silu #1"), ("input", f"{FEED}.down"))
LOSS, SCALED = (("loss", "loss"),), (("loss", "loss"), ("gradient", "head"))
CLEAN = (
    *(("ddp", kind) for kind in ("plain", "manual", "scalars", "coarse", "clipped")),
    *(("fsdp", kind) for kind in ("plain", "gelu", "scalars", "clipped")),
    *(("tensor", kind) for kind in ("plain", "manual", "momentum", "smoothed")),
    *(("hand", kind) for kind in ("plain", "manual", "clipped", "coarse")),
    *(("pipe", kind) for kind in ("plain", "gelu", "smoothed")),
)
ALSO_CLEAN = (("ddp", "plain", "recomputed"), ("ddp", "manual", "rewritten"), ("tensor", "plain", "rewritten"))
FAULTS = (
    Fault("ddp", "plain", "no mask", OF_ATTENTION, ("formula",)),
    Fault("hand", "manual", "mask one later", OF_SCORES, ("formula",)),
    Fault("fsdp", "plain", "other scale", OF_ATTENTION, ("formula",)),
    Fault("ddp", "manual", "softmax of queries", (("function", f"{ATTENTION}: softmax #1"),), ("formula",)),
    Fault("tensor", "plain", "other activation", OF_GATE, ("formula",)),
    Fault("pipe", "gelu", "tanh", (("function", f"{FEED}: gelu #1"),), ("formula",)),
    Fault("pipe", "plain", "queries one later", (("input", OF_ATTENTION[0][1]),), ("formula", "unknown")),
    Fault("ddp", "plain", "half of the residual", (("input", "layers.1.norm2"),), ("formula", "unknown")),
    Fault("fsdp", "plain", "eps of a norm", (("output", "layers.1.norm1"),), ("formula",)),
    Fault("hand", "plain", "eps of the last norm", (("output", "norm"),), ("formula",)),
    Fault("fsdp", "scalars", "other heat", (("scalar", ""),), ("formula",)),
    Fault("ddp", "scalars", "other balance", (("scalar", ""),), ("scale", "formula")),
    Fault("ddp", "plain", "other beta", _steps("embed"), ("optimizer",)),
    Fault("tensor", "plain", "other eps", _steps("embed"), ("optimizer",)),
    Fault("hand", "plain", "moments lost", _steps("embed"), ("optimizer",)),
    Fault("fsdp", "plain", "one moment lost", _steps(f"{FEED}.up"), ("optimizer",)),
    Fault("pipe", "plain", "decayed vectors", _steps("layers.0.norm1"), ("optimizer",)),
    Fault("ddp", "momentum", "other momentum", _steps("embed"), ("optimizer",)),
    Fault("ddp", "plain", "all tokens", SCALED, ("scale",)),
    Fault("fsdp", "plain", "samples", SCALED, ("scale",)),
    Fault("hand", "plain", "microbatches", SCALED, ("scale",)),
    Fault("ddp", "plain", "replicas twice", SCALED, ("scale",)),
    Fault("tensor", "plain", "smoothed", LOSS, ("formula",)),
    Fault("pipe", "plain", "padding counts", LOSS, ("order", "masked_tokens", "formula")),
    Fault("ddp", "clipped", "clipped before the sum", (("norm", ""), ("gradient", "head")), ("norm",)),
    Fault("hand", "clipped", "norm of a stage", (("norm", ""), ("gradient", "head")), ("norm",)),
    Fault("fsdp", "plain", "not zeroed", (("gradient", "head"),), ("stale",)),
    Fault("hand", "plain", "stage not zeroed", (("gradient", "layers.0.feed.down"),), ("stale",)),
    Fault("pipe", "plain", "detached residual", (("gradient", "layers.0.feed.down"),), ("detached",)),
    Fault("tensor", "plain", "detached keys", (("gradient", f"{ATTENTION}.k"),), ("detached",)),
)


def run(rounds: int | None = None) -> Report:
    about = f"pipeflow check: {len(FAULTS)} faults of functions, optimizers, divisors and scalars"
    report = Report("checking_fourth", about, COLUMNS)
    counts: dict[str, Counter[str]] = {"fitted": Counter(), "judged": Counter()}
    with tempfile.TemporaryDirectory() as folder:
        clean, found = results(Path(folder))
    for index, (case, result) in enumerate(zip(FAULTS, found, strict=True)):
        right = judged(case, result)
        half = counts["judged" if index % 2 else "fitted"]
        half.update(dict(zip(("found", "right place", "right cause"), right, strict=True)))
        first = result.first
        place = "" if first is None else f"{first.parameter or first.module}"
        cause = result.cause.name if result.cause else ""
        told = [case.fault, case.engine, first.what if first else "alike", place, cause, f"{sum(right)} of 3"]
        report.rows.append([f"V{index}", *told])
        report.data[f"V{index}"] = result.to_json()
    alarms = [f"{engine} {kind}" for (engine, kind, *_), each in zip(_clean(), clean, strict=True) if not each.alike]
    for name, half in counts.items():
        listed = ", ".join(f"{what} {half[what]}" for what in ("found", "right place", "right cause"))
        report.notes.append(f"{name}: {listed} of {len(FAULTS) // 2}")
    report.notes.append(f"false alarms: {len(alarms)} of {len(clean)}{': ' if alarms else ''}{', '.join(alarms)}")
    return report


def _clean() -> Sequence[tuple[str, str, str]]:
    return [*((engine, kind, "") for engine, kind in CLEAN), *ALSO_CLEAN]


def results(folder: Path, faults: Sequence[Fault] = FAULTS) -> tuple[list[Result], list[Result]]:
    """The comparisons of the jobs without a fault, and of those with these."""
    jobs = [*_clean(), *((case.engine, case.kind, case.fault) for case in faults)]
    named = [(f"{index}", *job) for index, job in enumerate(jobs)]
    for kind in sorted({kind for _, _, kind, _ in named}):
        between.plain(str(folder / kind), kind)
    run_processes(between.run, between.RANKS, str(folder), named)
    found = [check(folder / kind, folder / name) for name, _, kind, _ in named]
    return found[: len(_clean())], found[len(_clean()) :]


def judged(case: Fault, result: Result) -> tuple[bool, bool, bool]:
    """Whether the fault was found, at a right place, and with a right cause."""
    first, cause = result.first, result.cause
    if first is None or cause is None:
        return False, False, False
    return True, (first.what, first.module) in case.places, cause.name in case.causes
