"""What comes from a file cannot speak to the terminal."""

from __future__ import annotations

import re
import sys
import unicodedata
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console, RenderableType

from pipeflow.draw import Axis, Comparison, CriticalPath, Gantt, Point, Scatter, Table
from pipeflow.tools.cli import main
from tests.draw.samples import planned

HOSTILE = "\x1b]0;owned\x07\x9b31m\r\x08\u202e\x7f\udc80"
WRITTEN = r"\x1b]0;owned\x07\x9b31m\r\x08\u202e\x7f\udc80"
CELLS = "0F0,0B0\n1F0,1B0\n"
TIMELINE = replace(planned("1f1b", 2, 2), name=HOSTILE)


def harmless(text: str) -> bool:
    return all(letter == "\n" or unicodedata.category(letter)[0] != "C" for letter in text)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a timeline of a hostile name, and a table in a file of such a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "timeline.json").write_text(TIMELINE.to_json(), encoding="utf-8")
    if sys.getfilesystemencoding() != "utf-8":
        pytest.skip("this locale has no file of such a name")
    (tmp_path / f"{HOSTILE}.csv").write_text(CELLS, encoding="utf-8")
    (tmp_path / "wrong.csv").write_text(CELLS.replace("0B0", "0B0\x1b]0;owned\x07"), encoding="utf-8")
    (tmp_path / "wrong.json").write_text('{"paths": [[0]], "rows": [[]], "\\u001b[2J": 1}', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("draw", "timeline.json"),
        ("draw", "timeline.json", "--critical-path"),
        ("draw", f"{HOSTILE}.csv", "--critical-path"),
        ("diff", "timeline.json", "1f1b"),
        ("diff", f"{HOSTILE}.csv", "zb-v", "--ranks", "2"),
        ("compare", f"{HOSTILE}.csv", "timeline.json"),
        ("verify", f"{HOSTILE}.csv"),
        ("verify", "timeline.json"),
        ("draw", f"{HOSTILE}.csv", "--ranks", "2"),
        ("compare", f"{HOSTILE}.json"),
    ],
)
def test_a_name_is_printed_escaped(files: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    main(command)
    captured = capsys.readouterr()
    assert harmless(captured.out + captured.err)
    folded = "".join((captured.out + captured.err).split())
    assert WRITTEN in folded


@pytest.mark.parametrize("name", ["wrong.csv", "wrong.json"])
def test_what_is_wrong_in_a_file_is_printed_escaped(files: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["verify", name]) == 2
    message = capsys.readouterr().err
    assert harmless(message)
    assert r"\x1b" in message


@pytest.mark.parametrize("colours", [None, "truecolor"])
@pytest.mark.parametrize(
    "drawing",
    [
        Gantt(TIMELINE),
        Comparison(TIMELINE, TIMELINE),
        CriticalPath(TIMELINE),
        Table(["", HOSTILE], [[HOSTILE, "1"]]),
        Scatter([Point(HOSTILE, 1, 1)], Axis("memory", str), Axis("bubble", str)),
    ],
    ids=lambda drawing: type(drawing).__name__,
)
def test_a_drawing_escapes_the_names_in_it(drawing: RenderableType, colours: Literal["truecolor"] | None) -> None:
    """The escapes of colours are rich's own."""
    file = StringIO()
    console = Console(file=file, width=120, color_system=colours, force_terminal=colours is not None)
    console.print(drawing)
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert WRITTEN in text
    assert harmless(text)
