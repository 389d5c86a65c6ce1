"""A kind of action that the package does not know, on a stream of its own: told to the table alone, it is drawn in
every form and by the command.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipeflow

pytestmark = pytest.mark.slow  # it starts a process

KIND = '    R = "R"', '    D = "D"\n    R = "R"'
STREAM = '    REDUCE = "reductions"', '    REDUCE = "reductions"\n    DISK = "disk"'
TABLE = "DATAFLOW: dict[Kind, DataflowRow] = {"
ROW = TABLE, TABLE + '\n    Kind.D: DataflowRow("spill", (), (), stream=Stream.DISK),'
CHANGES = {"core/action.py": [KIND], "core/dataflow.py": [STREAM, ROW]}

DRAWINGS = """
import json
from dataclasses import replace
from io import StringIO

from rich.console import Console

from pipeflow import Action, Kind, Span, make_schedule, simulate
from pipeflow.tools.cli import main
from pipeflow.draw import CriticalPath, Gantt, html, perfetto, picture, svg

timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=3))

def spilled(row):
    uses = [
        Span(Action(Kind.D, span.action.stage, span.action.microbatch), span.rank, span.end + 0.5, span.end + 1.25)
        for span in row if span.action.kind is Kind.F
    ]
    return tuple(sorted([*row, *uses], key=lambda span: span.start))

timeline = replace(timeline, name="spilled", rows=tuple(map(spilled, timeline.rows)))
drawings = {"picture": picture(timeline), "svg": svg(timeline), "html": html(timeline), "perfetto": perfetto(timeline)}
for name, colours in (("plain", None), ("standard", "standard"), ("truecolor", "truecolor")):
    console = Console(file=StringIO(), width=100, color_system=colours, force_terminal=colours is not None)
    console.print(Gantt(timeline), CriticalPath(timeline))
    drawings[name] = console.file.getvalue()
with open("drawings.json", "w") as file:
    json.dump(drawings, file)
with open("timeline.json", "w") as file:
    file.write(timeline.to_json())
with open("table.csv", "w") as file:
    file.write("0F0,0D0,0B0")
with open("costs.json", "w") as file:
    json.dump({"forward": [1], "backward_input": [1], "backward_weight": [1], "times": {"D": [5]}}, file)
assert main(["draw", "timeline.json", "--svg", "drawn.svg", "--html", "drawn.html", "--perfetto", "trace.json"]) == 0
assert main(["draw", "timeline.json", "--critical-path"]) == 0
assert main(["simulate", "timeline.json"]) == 0
assert main(["diff", "timeline.json", "1f1b", "--forward", "1"]) == 0
assert main(["simulate", "table.csv", "--costs", "costs.json"]) == 0
"""


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a copy of the package draws whose table has one more row."""
    folder = tmp_path_factory.mktemp("new_kind")
    shutil.copytree(Path(pipeflow.__file__).parent, folder / "pipeflow", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in CHANGES.items():
        path = folder / "pipeflow" / name
        text = path.read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")
    argv = [sys.executable, "-c", DRAWINGS]
    environment = {"PYTHONPATH": str(folder), "COLUMNS": "100", "PATH": ""}
    result = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads((folder / "drawings.json").read_text(encoding="utf-8"))
    return found | {"command": result.stdout}


@pytest.mark.parametrize("name", ["plain", "picture", "command"])
def test_a_new_kind_has_a_line_and_a_letter_as_text(drawings: dict[str, str], name: str) -> None:
    (first, *_) = [line for line in drawings[name].splitlines() if line.startswith("disk ")]
    assert "D0" in first
    assert "." not in first


@pytest.mark.parametrize("name", ["plain", "standard", "truecolor", "svg", "html", "command"])
def test_a_new_kind_is_in_the_legend(drawings: dict[str, str], name: str) -> None:
    assert "spill" in drawings[name]


def test_a_new_kind_has_a_colour_of_its_own(drawings: dict[str, str]) -> None:
    assert "38;2;255;0;34m" in drawings["truecolor"]
    assert 'fill="#ff0022"' in drawings["svg"]
    assert "#ff0022" in drawings["html"]


def test_a_new_kind_has_a_track_of_its_stream_and_a_slice_an_action(drawings: dict[str, str]) -> None:
    events = json.loads(drawings["perfetto"])["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 1", "rank 0 disk", "rank 1 disk"]
    assert sum(event["args"].get("kind") == "spill" for event in events if event["ph"] == "X") == 6


def test_the_command_says_how_long_a_stream_runs_and_what_of_it_is_exposed(drawings: dict[str, str]) -> None:
    assert "disk              2.25, exposed 0\n" in drawings["command"]
    assert "disk 2.25, exposed 0 " in drawings["command"]


def test_a_file_of_costs_prices_a_new_kind(drawings: dict[str, str]) -> None:
    assert "disk              5, exposed 3\n" in drawings["command"]
