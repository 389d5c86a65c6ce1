"""Published training steps of mixtures of experts beside their plans. The launches of experts are fitted on FITTED;
no other coefficient has seen these steps.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.planner_tables import ROOT
from benchmarks.report import Report, between
from pipeflow.tools.cli.command import main

FITTED = "the same, four tensor ranks"
LINKS = {  # the sources of rows that do not say "the same"
    "megatron-core": (
        "Megatron Core MoE",
        "https://github.com/NVIDIA/Megatron-LM/blob/022bcb5afe888664d3fb61adacea6e6c887a97f8/megatron/core/transformer/moe/README.md",
    ),
    "model-zoo": ("Megatron MoE Model Zoo", "https://github.com/yanring/Megatron-MoE-ModelZoo"),
    "2412.19437": ("arXiv 2412.19437", "https://arxiv.org/abs/2412.19437"),
}
GUIDE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- written by: python -m benchmarks mixtures --save -->\n", "<!-- end of mixtures -->\n"
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
    found = [(step, error(step)) for step in chosen]
    report = Report("mixtures", "mixtures: published steps and plans", ["", "measured s", "planned s", "error"])
    for step, off in found:
        times = step.seconds, step.seconds * (1 + off)
        report.rows.append([f"{step.what} ({step.source})", *(f"{time:.3g}" for time in times), f"{off:+.0%}"])
    offs = [abs(off) for _, off in found]
    report.notes.append(f"mean error {fmean(offs):.0%}; {sum(off <= 0.15 for off in offs)} of {len(offs)} within 15 %")
    report.notes.append(f"the launches of experts are fitted on one row, {FITTED!r}")
    report.data = {"errors": {step.what: off for step, off in found}}
    return report


def publish(report: Report) -> None:
    """Writes the table of the guide."""
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(between(text, BEGIN, END, docs_table(report.data["errors"])), encoding="utf-8")


def docs_table(errors: Mapping[str, float]) -> str:
    """A line per step."""
    lines = ["| published steps | measured | planned | error |", "|---|---:|---:|---:|"]
    for step in steps():
        off = errors[step.what]
        link = f" ([{LINKS[step.source][0]}]({LINKS[step.source][1]}))" if not step.what.startswith("the same") else ""
        fitted = " (fitted)" if step.what == FITTED else ""
        times = f"{step.seconds:.1f} s | {step.seconds * (1 + off):.1f} s"
        lines.append(f"| {step.what}{link}{fitted} | {times} | {100 * off:.0f} % |")
    return "\n".join(lines) + "\n"
