"""Reports: a table on the terminal, and with --save a JSON and a short markdown file in results/."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pipeflow

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Report:
    """What one benchmark found: `rows` under `columns`, remarks, and the raw figures."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*row)
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False)

    def save(self, load: float) -> None:
        """Writes results/NAME.json and results/NAME.md; `load` is what else the machine did in the minute before."""
        where = surroundings(load)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(
            json.dumps(asdict(self) | {"surroundings": where}, indent=1) + "\n", encoding="utf-8"
        )
        (RESULTS / f"{self.name}.md").write_text(self._markdown(where), encoding="utf-8")

    def _markdown(self, where: dict[str, str]) -> str:
        lines = [f"# {self.title}", "", " | ".join(["", *self.columns, ""]).strip()]
        lines.append("|---" + "|---:" * (len(self.columns) - 1) + "|")
        lines += [" | ".join(["", *row, ""]).strip() for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes), *([""] if self.notes else [])]
        lines.append(", ".join(f"{key} {value}" for key, value in where.items()) + ".")
        return "\n".join(lines) + "\n"


def between(text: str, begin: str, end: str, new: str) -> str:
    """The text with `new` between two marks."""
    before, rest = text.split(begin)
    return before + begin + new + end + rest.split(end, 1)[1]


def surroundings(load: float) -> dict[str, str]:
    """The hardware, the date and the versions that the figures belong to."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} x {_processor()}",
        "load before": f"{load:.1f}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "pipeflow": f"{pipeflow.__version__} ({_commit()})",
    }


def _processor() -> str:
    """The model's name, and the newest of a few instruction sets, since clouds hide the model."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("model name")), "unknown CPU")
    newest = next((flag for flag in ("amx_bf16", "avx512f", "avx2") if flag in text), "")
    return f"{name} ({newest})" if newest else name


def _commit() -> str:
    """The commit that was measured; with a plus when the package had changes on top of it."""
    head = git("rev-parse", "--short", "HEAD")
    clean = git("diff", "--quiet", "HEAD", "--", "pipeflow").returncode == 0
    return head.stdout.strip() + ("" if clean else "+") if head.returncode == 0 else "no commit"


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(RESULTS.parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
