"""Makes the pictures of a timeline: as a terminal shows it, for docs/simulating.md, and the page of `draw --html` in a
browser, for the README. Needs Chromium for the second one: make pictures
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

import pipeflow
from pipeflow.draw import Gantt, html

FOLDER = Path(__file__).parent / "pictures"
WIDTH, HEIGHT = 1100, 510  # pixels, of the page


def timeline() -> pipeflow.Timeline:
    """What both pictures show."""
    return pipeflow.simulate(pipeflow.make_schedule("zb-v", ranks=4, microbatches=8))


def terminal() -> str:
    """An SVG of what `pipeflow draw zb-v` prints, in colour, without the font that Rich would load from the network."""
    console = Console(record=True, width=82, file=io.StringIO(), force_terminal=True)
    console.print(Gantt(timeline()))
    picture = console.export_svg(title="pipeflow draw zb-v --ranks 4 --microbatches 8", unique_id="pipeflow")
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)


def page(file: Path) -> None:
    """Writes a PNG of the page. Raises FileNotFoundError without Chromium."""
    browser = shutil.which("chromium")
    if browser is None:
        raise FileNotFoundError("chromium is not installed, so there is no picture of the page")
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder, "page.html")
        shown.write_text(html(timeline()), encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={WIDTH},{HEIGHT}",
        ]
        subprocess.run([browser, *options, f"--screenshot={file}", shown.as_uri()], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    (folder / "terminal.svg").write_text(terminal(), encoding="utf-8")
    try:
        page(folder / "page.png")
    except FileNotFoundError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
