"""The figures of documents. Those of README.md and docs/faq.md are cells of results/NAME.json, with the day and the
commit of their measurements; other pages show the table of one result. `python -m benchmarks --shown --save` measures
and writes all of them again. A test holds the documents to the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, between, git

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- written by: python -m benchmarks --shown --save -->\n", "<!-- end -->"
OTHER_HARDWARE = {"one_gpu", "links"}
"""Benchmarks that need a GPU, or root's rights: `--shown` leaves them out."""


class Figure(NamedTuple):
    """A line of a table: what was measured by which benchmark, the column of its report, how a value is written, and
    the rows of pipeflow, of torch and of the loop by hand, where there is one.
    """

    what: str
    benchmark: str
    column: str
    form: str
    pipeflow: str
    torch: str | None = None
    by_hand: str | None = None


MS, X = "{:.0f} ms", "{:.2f} x"
FIGURES = (
    Figure(
        "1F1B, 8 ranks whose stages sleep",
        "sleep", "median ms", MS, "1f1b: pipeflow", "1f1b: torch", "1f1b: by hand",
    ),
    Figure(
        "interleaved 1F1B, also 8 ranks that sleep",
        "sleep", "median ms", MS, *(f"interleaved-1f1b: {who}" for who in ("pipeflow", "torch", "by hand")),
    ),
    Figure(
        "1F1B on 2 ranks, real blocks",
        "compute", "median ms", MS, "1f1b: pipeflow", "1f1b: torch", "1f1b: by hand",
    ),
    Figure(
        "zero bubble (zb-v) on 2 ranks, real blocks",
        "zero_bubble", "median ms", MS, "zb-v: pipeflow", "zb-v: torch",
    ),
    Figure("I + W of a split backward, against B", "halves", "x torch's B", X, "deferring: I + W", "torch: I + W"),
    Figure("time until every rank knows that one has died", "failure", "slowest", "{:.2f} s", "kill -9"),
    Figure(
        "receive buffers of a rank, 32 microbatches",
        "buffers", "rank 1", "{:.0f}", "pipeflow, allocated", "torch, allocated", "by hand, allocated",
    ),
)  # fmt: skip
IN_README = ("compute", "zero_bubble")
WHOLE = {"docs/tuning.md": "tuning", "docs/convergence.md": "convergence"}
"""The pages that show the table of one result."""
DOCUMENTS = ("README.md", "docs/faq.md", *WHOLE)


@cache
def result(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def cell(figure: Figure, row: str | None) -> str:
    """The value as the documents show it; empty if there is no such row."""
    if row is None:
        return ""
    report = result(figure.benchmark)
    column = report["columns"].index(figure.column)
    return figure.form.format(float(next(line[column] for line in report["rows"] if line[0] == row)))


def measured(name: str) -> str:
    """The day and the commit."""
    where = result(name)["surroundings"]
    return f"{where['date']}, {where['pipeflow'].partition('(')[2].rstrip(')')}"


def table(document: str) -> str:
    """The table of a document, between its marks."""
    if name := WHOLE.get(document):
        report = result(name)
        rows = [report["columns"], ["---", *["---:"] * len(report["columns"][1:])], *report["rows"]]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*lines, "", f"Measured on {measured(name).replace(', ', ', at commit ')}.", ""])
    titles = ["measured", "command", "pipeflow", "torch.distributed.pipelining", "a loop by hand", "on, commit"]
    lines = [" | ".join(["", *titles, ""]).strip(), "|---|---|---:|---:|---:|---|"]
    for figure in FIGURES:
        if document != "README.md" or figure.benchmark in IN_README:
            values = [cell(figure, row) for row in (figure.pipeflow, figure.torch, figure.by_hand)]
            command = f"`python -m benchmarks {figure.benchmark}`"
            lines.append(" | ".join(["", figure.what, command, *values, measured(figure.benchmark), ""]).strip())
    return re.sub(" +", " ", "\n".join(lines)) + "\n"


def write(document: str) -> str:
    """The text of the document with its table as the results have it."""
    return between((ROOT / document).read_text(encoding="utf-8"), BEGIN, END, table(document))


def publish() -> None:
    result.cache_clear()
    for document in DOCUMENTS:
        (ROOT / document).write_text(write(document), encoding="utf-8")


def shown(names: tuple[str, ...]) -> list[str]:
    """Those of the benchmarks that README or a document names."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(document.read_text(encoding="utf-8") for document in documents)
    mentioned = set(re.findall(r"-m benchmarks (\w+)|benchmarks/results/(\w+)\.md", text))
    return [name for name in names if {(name, ""), ("", name)} & mentioned and name not in OTHER_HARDWARE]


def older(name: str, folders: tuple[str, ...]) -> str | None:
    """The commit of a result that is older than the newest commit of the code that it times; None if it is not."""
    if not (RESULTS / f"{name}.json").exists():
        return "never saved"
    commit = result(name)["surroundings"]["pipeflow"].partition("(")[2].rstrip("+)")
    changed = git("diff", "--quiet", commit, "HEAD", "--", *(f"pipeflow/{folder}" for folder in folders))
    return None if changed.returncode == 0 else measured(name)
