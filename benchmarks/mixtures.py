"""Published training steps of mixtures of experts beside their plans. The launches of experts are fitted on FITTED;
no other coefficient has seen these steps.
"""

from __future__ import annotations

import csv
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.report import Report
from pipeflow.cli.command import main

FITTED = "the same, four tensor ranks"
DATA = Path(__file__).parent / "data" / "measured_mixtures.csv"


class Step(NamedTuple):
    """A measured step, and the words of `pipeflow plan` that ask for it."""

    source: str
    what: str
    seconds: float
    words: str


def steps() -> list[Step]:
    """Those of data/measured_mixtures.csv."""
    with DATA.open() as file:
        return [Step(row["source"], row["what"], float(row["step_s"]), row["words"]) for row in csv.DictReader(file)]


def error(step: Step) -> float:
    """How much longer the plan is than the step, as a share of the latter."""
    return float(planned(step)["step_seconds"]) / step.seconds - 1


def planned(step: Step) -> dict[str, Any]:
    """What the command prints as JSON."""
    with redirect_stdout(io.StringIO()) as text:
        if main(["plan", *step.words.split(), "--json"]):
            raise RuntimeError(f"no plan of: {step.words}")
    found: dict[str, Any] = json.loads(text.getvalue())
    return found


def run(rounds: int | None = None) -> Report:
    """The table; `rounds` does not matter, since nothing is measured here."""
    chosen = steps()
    errors = [error(step) for step in chosen]
    report = Report("mixtures", "mixtures: published steps and plans", ["", "measured s", "planned s", "error"])
    for step, off in zip(chosen, errors, strict=True):
        times = step.seconds, step.seconds * (1 + off)
        report.rows.append([f"{step.what} ({step.source})", *(f"{time:.3g}" for time in times), f"{off:+.0%}"])
    near = sum(abs(off) <= 0.155 for off in errors)
    report.notes.append(f"mean error {fmean(map(abs, errors)):.0%}; {near} of {len(errors)} within 15.5 %")
    report.notes.append(f"the launches of experts are fitted on one row, {FITTED!r}")
    report.data = {"errors": dict(zip((step.what for step in chosen), errors, strict=True))}
    return report
