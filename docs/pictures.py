"""Writes the picture of docs/simulating.md: a timeline as a terminal shows it: make pictures"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

import pipeflow
from pipeflow.draw import Gantt

FOLDER = Path(__file__).parent / "pictures"


def terminal() -> str:
    """An SVG of what `pipeflow draw zb-v` prints, in colour, without the font that Rich would load from the network."""
    console = Console(record=True, width=82, file=io.StringIO(), force_terminal=True)
    console.print(Gantt(pipeflow.simulate(pipeflow.make_schedule("zb-v", ranks=4, microbatches=8))))
    picture = console.export_svg(title="pipeflow draw zb-v --ranks 4 --microbatches 8", unique_id="pipeflow")
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    (folder / "terminal.svg").write_text(terminal(), encoding="utf-8")


if __name__ == "__main__":
    main()
