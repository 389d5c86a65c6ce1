"""The table of all forms in docs/others.md: a section for each library, a row for each form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.stages.others.form import TOLERANCE, Form
from tests.stages.others.outcome import SCHEDULES, TENSOR, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "others.md"
BEGIN, END = "<!-- python -m tests.stages.others writes from here -->", "<!-- to here -->"
COLUMNS = (*SCHEDULES, TENSOR)


def row(form: Form, found: Mapping[str, Outcome], version: str, date: str) -> str:
    """The row of a form: the largest difference under each schedule, or what came instead; and what was said."""
    cells = [_cell(found[name]) if name in found else "" for name in COLUMNS]
    said = next((each.said for each in found.values() if each.kind not in ("right", "-")), "")
    return f"| {' | '.join([f'`{form.name}`', *cells, f'{version}, {date}', _plain(said)])} |"


def _cell(outcome: Outcome) -> str:
    if outcome.kind == "right":
        return f"{outcome.distance:.0e}" if outcome.distance else "0"
    return outcome.kind


def _plain(said: str) -> str:
    return re.sub(r"\s+", " ", said).replace("|", "\\|").replace("<", "\\<")


def rows_in(page: str) -> dict[str, str]:
    """The rows of a page, by title of the form."""
    found, library = {}, ""
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        library = line.removeprefix("## ") if line.startswith("## ") else library
        if name := re.match(r"\| `(.*?)` \|", line):
            found[f"{library}: {name[1]}"] = line
    return found


def written(page: str, forms: Sequence[Form], rows: Mapping[str, str]) -> str:
    """The page with the rows of these forms, in their order, and the counts."""
    lines = [f"{len(rows)} forms: {_counted(rows)}.", ""]
    for library, own in groupby(forms, lambda form: form.package):
        there = [rows[form.title] for form in own if form.title in rows]
        lines += [f"## {library}", "", f"| model | {' | '.join(COLUMNS)} | version, date | message |"]
        lines += ["|---" * (len(COLUMNS) + 3) + "|", *there, ""]
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}"


def _counted(rows: Mapping[str, str]) -> str:
    cells = [{cell.strip() for cell in line.split(" | ")[1 : 1 + len(COLUMNS)]} for line in rows.values()]
    kinds = [next((kind for kind in ("wrong", "error", "refused") if kind in each), "right") for each in cells]
    texts = {
        "right": f"equal to the plain module within {TOLERANCE:.0e} wherever they were tried",
        "refused": "refused with an error at least once",
        "error": "stopped by another error",
        "wrong": "different from the plain module",
    }
    return ", ".join(f"{kinds.count(kind)} {text}" for kind, text in texts.items() if kind in kinds)
