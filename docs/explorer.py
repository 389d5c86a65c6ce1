"""Writes explorer.html, the explorer with prebuilt answers: one file that opens without a server. `make docs` puts it
among the pages.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlencode

from pipeflow.core.errors import UsageError
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.tools.cli import explore
from pipeflow.tools.cli.command import parser
from pipeflow.tools.explore.page_files import Fields, Range, name, prebuilt
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.tour import STEPS

FILE = "explorer.html"
SLIDERS: dict[str, Range] = {
    "microbatches": (1, 32, 1),
    "chunks": (1, 4, 1),
    "backward_weight": (0, 2, 0.5),
    "latency": (0, 1, 0.25),
}


def tour() -> Iterator[Fields]:
    """The states that the tour leads to."""
    for step in STEPS:
        yield from (step.start, step.goal, *step.more.values())


def sizes() -> Iterator[Fields]:
    """Every schedule with up to 12 microbatches, and simple ones with up to 32; on 8 ranks with 16."""
    for schedule in SCHEDULES:
        most = 32 if schedule in ("gpipe", "1f1b") else 12
        for microbatches in range(1, most + 1):
            yield {"schedule": schedule, "microbatches": str(microbatches)}
        yield {"schedule": schedule, "ranks": "8", "microbatches": "16"}
        if "chunks" in options_of(schedule):
            yield from ({"schedule": schedule, "chunks": str(chunks)} for chunks in range(1, 5))


def costs() -> Iterator[Fields]:
    """Every schedule, and those of the tour side by side, with what the sliders of costs set one at a time."""
    shown = [*SCHEDULES, *dict.fromkeys(fields["schedule"] for fields in tour() if "," in fields["schedule"])]
    for field in ("backward_weight", "latency"):
        _, most, step = SLIDERS[field]
        for schedule in shown:
            yield from ({"schedule": schedule, field: f"{each * step:g}"} for each in range(round(most / step) + 1))


@cache
def drawn() -> list[Fields]:
    """All states, without those that cannot be drawn."""
    found = {name(fields): fields for states in (sizes(), costs(), tour()) for fields in states}
    return [fields for fields in found.values() if _is_drawn(fields)]


def _is_drawn(fields: Fields) -> bool:
    try:
        state = State.of(fields)
        for each in state.schedules:
            state.timeline(each)
    except UsageError:
        return False
    return True


def write(folder: Path) -> None:
    """Writes the page."""
    states = drawn()
    single = [fields for fields in states if "," not in fields["schedule"]]
    compared: list[Fields] = [{"schedule": schedule} for schedule in SCHEDULES]
    asked: dict[str, list[Fields]] = {
        "plan": states,
        "tour": states,
        "csv": single,
        "code": single,
        "compare": compared,
    }
    (folder / FILE).write_text(prebuilt(asked, SLIDERS), encoding="utf-8")


def link(command: str) -> str:
    """The address of the page in the state that `pipeflow explore ...` shows.

    >>> link("pipeflow explore zb-v --ranks 8 --microbatches 16")
    'explorer.html#schedule=zb-v&ranks=8&microbatches=16'
    """
    _, *words = shlex.split(command)
    fields = explore.fields(parser("explore").parse_args(words))
    if name(fields) not in map(name, drawn()):
        raise UsageError(f"{command}: explorer.html does not have this state")
    return f"{FILE}#{urlencode(fields)}" if fields else FILE


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
