"""`pipeflow check` on faults of public reports: the 11 of Megatron-LM#7452 and the 14 of TTrace (arXiv 2506.09280),
each planted in a job of one of five engines. Does it find the first wrong value, and the cause? `checking_second` has
a second set of faults.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.checked import dtensors, gpt, pipelines, replicas, sharded, split, stages
from benchmarks.report import Report
from pipeflow.checking import Result, check
from pipeflow.testing import run_processes

COLUMNS = ["report", "fault", "engine", "first", "place", "cause", "right"]
CLIP = 0.05
REFERENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"sizes": gpt.Sizes(tied=True)},
    "clipped": {"clip": CLIP},
    "smoothed": {"smoothing": 0.1},
}


@dataclass(frozen=True)
class Case:
    """A fault in a job, and what must be said of it.

    Attributes:
        report: where such a fault was reported: M for Megatron-LM#7452, T for TTrace, with its number.
        about: the fault in words.
        engine: module of the job.
        fault: its name there.
        first: what is first to differ.
        module: where.
        causes: the causes that are right.
        stage: the stage, if the engine has stages.
        reference: the plain run to compare with.
        options: more arguments of the job.
        job: the function of the engine that runs it.
    """

    report: str
    about: str
    engine: ModuleType
    fault: str
    first: str
    module: str
    causes: tuple[str, ...]
    stage: int | None = None
    reference: str = "plain"
    options: tuple[Any, ...] = ()
    job: str = "run"


CASES = (
    Case("M1", "label smoothing over a rank's own vocabulary", split, "local vocabulary", "loss", "loss",
         ("missing_reduction",), reference="smoothed"),
    Case("M2", "gathered logits taken for parts: log(TP) too large", split, "gathered logits", "loss", "loss",
         ("sharding",)),
    Case("M3", "a mean over each replica's own tokens", replicas, "local tokens", "loss", "loss", ("masked_tokens",)),
    Case("M4", "recomputed activations of another replica", replicas, "recompute", "gradient",
         "blocks.2.down", ("order",)),
    Case("M5", "the mean of microbatches instead of tokens", stages, "mean of means", "loss", "loss",
         ("masked_tokens",), 1),
    Case("M6", "an output gathered in another order of ranks", dtensors, "swapped gather", "output",
         "blocks.1.attention", ("sharding",)),
    Case("M7", "a sequence scattered over the wrong ranks", split, "scattered in another order", "output",
         "blocks.2.ln2", ("sharding",)),
    Case("M8", "split parameters left out of the norm", dtensors, "left out of the norm", "gradient", "head",
         ("norm",), reference="clipped", options=(gpt.SIZES, CLIP)),
    Case("M9", "whole parameters counted by each rank", dtensors, "counted twice", "gradient", "head", ("norm",),
         reference="clipped", options=(gpt.SIZES, CLIP)),
    Case("M10", "one bias without its sum over replicas", replicas, "one parameter", "gradient", "blocks.1.up",
         ("missing_reduction",)),
    Case("M11", "a norm's gradient without its sum over tensor ranks", dtensors, "norm not summed", "gradient",
         "blocks.1.ln2", ("missing_reduction",)),
    Case("T1", "a vocabulary-parallel embedding without its mask", split, "no mask", "output", "embed", ("sharding",)),
    Case("T2", "a microbatch that adds nothing", stages, "missing microbatch", "loss", "loss",
         ("missing_microbatch",), 1),
    Case("T3", "a layer whose sum over ranks is a mean elsewhere", replicas, "no average", "gradient", "blocks.2.down",
         ("scale",)),
    Case("T4", "a loss scaled by the number of replicas", replicas, "scale", "gradient", "head", ("scale",)),
    Case("T5", "embedding and head that are not tied", stages, "no tie", "gradient", "embed", ("missing_tie",), None,
         "tied", (gpt.Sizes(tied=True),)),
    Case("T6", "a router's weights without their sum", dtensors, "router not summed", "gradient", "blocks.3.ln1",
         ("missing_reduction",)),
    Case("T7", "gradients of the step before, by an overlap", sharded, "stale", "gradient", "blocks.2.down",
         ("stale",)),
    Case("T8", "stages with the wrong layers", stages, "wrong division", "weight", "blocks.2.ln1", ("sharding",), 1),
    Case("T9", "parameters that the sharded optimizer leaves out", sharded, "left out", "update", "blocks.3.up",
         ("stale",)),
    Case("T10", "a layer in a coarser dtype", sharded, "coarse layer", "output", "blocks.1.ln1", ("precision",)),
    Case("T11", "a cast to a coarser dtype in a stage", pipelines, "coarse", "output", "blocks.3.up", ("precision",),
         1),
    Case("T12", "a layer's gradient multiplied by the microbatches", pipelines, "wrong factor", "gradient",
         "blocks.1.down", ("scale",), 0),
    Case("T13", "a row-parallel layer without its sum", split, "no sum", "output", "blocks.1.down",
         ("missing_reduction",)),
    Case("T14", "a bias added by every tensor rank", split, "bias twice", "output", "blocks.1.down", ("scale",)),
)  # fmt: skip


def run(rounds: int | None = None) -> Report:
    report = Report("checking", "pipeflow check: 25 faults of public reports in jobs of five engines", COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        fill(report, CASES, references_in(Path(folder)))
    report.notes.append("target: found 25, right module and stage 25, right cause 23")
    return report


def fill(report: Report, cases: Sequence[Case], references: dict[str, Path]) -> None:
    """Runs each case, and adds its row and the totals."""
    found = places = causes = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            result = recorded(case, Path(folder, "candidate"), references)
            seen, place, cause = judged(case, result)
            found, places, causes = found + seen, places + place, causes + cause
            report.rows.append(_row(case, result, seen + place + cause))
            report.data[case.report] = result.to_json()
    report.notes.append(f"found {found}, right place {places}, right cause {causes} of {len(cases)}")


def references_in(folder: Path) -> dict[str, Path]:
    """The plain runs."""
    return {name: gpt.plain(folder / name, **options) for name, options in REFERENCES.items()}


def recorded(case: Case, folder: Path, references: dict[str, Path]) -> Result:
    """Runs a job with its fault, and compares it with its reference."""
    run_processes(getattr(case.engine, case.job), case.engine.RANKS, str(folder), case.fault, *case.options)
    return check(references[case.reference], folder)


def judged(case: Case, result: Result) -> tuple[bool, bool, bool]:
    """Whether the fault was found, at its place, and with its cause."""
    first, cause = result.first, result.cause
    if first is None or cause is None:
        return False, False, False
    stage = case.stage is None or first.stage == case.stage
    return True, (first.what, first.module) == (case.first, case.module) and stage, cause.name in case.causes


def _row(case: Case, result: Result, right: int) -> list[str]:
    first, cause = result.first, result.cause
    what = "alike" if first is None else first.what
    place = "" if first is None else (first.parameter or first.module)
    engine = case.engine.__name__.rpartition(".")[2]
    return [case.report, case.about, engine, what, place, cause.name if cause else "", f"{right} of 3"]
