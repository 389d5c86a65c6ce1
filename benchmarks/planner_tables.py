"""The table of docs/planning.md that says how close plans come to published steps, from the data of the benchmark
`planner`. A test holds the document to benchmarks/results/planner.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- written by: python -m benchmarks planner --save -->", "<!-- end -->"
SINGLE, MULTI, TABLE_5 = "vtrain-single", "vtrain-multi", "2205.05198-tab5"
STEPS = {
    SINGLE: "one node of A100, GPTs of 0.2 to 1.3 billion parameters ([vTrain](https://github.com/VIA-Research/vTrain))",
    MULTI: "8 nodes of A100, a GPT of 3.6 billion (vTrain)",
    TABLE_5: "8 to 512 A100, GPTs of 22 to 1,000 billion ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198))",
}


def docs_table(data: Mapping[str, Any]) -> str:
    """All errors: with the planner's own coefficients, and with those that never saw the source or the model."""
    lines = ["| published steps | fitted on | mean error | bias | regret | largest | without the rule for ties |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    fits = {"": "everything", ", fitted without it": "other sources", ", fitted without the model": "other models"}
    for source, steps in STEPS.items():
        for suffix, words in fits.items():
            if (found := data["errors"].get(source + suffix)) is None:
                continue
            name = f"{steps}, {found['rows']:,} rows" if not suffix else ""
            cells = (found[key] for key in ("error", "bias", "regret", "largest_regret", "regret_without_ties"))
            lines.append(" | ".join([f"| {name}", words, *map(_percent, cells)]) + " |")
    return "\n".join(lines)


def tables(data: Mapping[str, Any]) -> dict[Path, str]:
    """The table, by document."""
    return {ROOT / "docs" / "planning.md": docs_table(data)}


def written(text: str) -> str:
    """What a document has between the two marks."""
    return text.split(BEGIN + "\n")[1].split("\n" + END)[0]


def write_tables(data: Mapping[str, Any]) -> None:
    """Writes them between the marks of the documents."""
    for path, table in tables(data).items():
        text = path.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
