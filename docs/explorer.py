"""Writes explorer.html, the explorer with prebuilt answers: one file that loads nothing and needs no server. `make
docs` puts it among the pages.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pipeflow.core.errors import UsageError
from pipeflow.draw.page.timeline_page import bundle, policy
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.tools.cli import explore
from pipeflow.tools.cli.command import parser
from pipeflow.tools.explore.answers import ANSWERS
from pipeflow.tools.explore.fields import ALL, FIELDS, Field
from pipeflow.tools.explore.server import document, page_files
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.tour import STEPS
from pipeflow.tools.explore.views import headline

Fields = Mapping[str, str]
Range = tuple[float, float, float]  # least, most and step of a slider

FILE = "explorer.html"
ANSWERED = '<script type="text/plain" id="answers">{}</script>\n'
ASKED = [field for field in ALL if field.group]  # what an answer depends on
CHARSET = '<meta charset="utf-8">\n'
END = "</body>"
FORM = 'autocomplete="off">'
NOTE = (
    '<p class="note">This page has {count} prebuilt states and needs no server. '
    "<code>pipeflow explore</code> on your machine draws any.</p>"
)
POLICY = '<meta http-equiv="Content-Security-Policy" content="{}; img-src data: blob:">\n'
PROGRAM = '<script type="module" src="explore.js"></script>\n'
SHEET = re.compile(r'<link rel="stylesheet" href="([\w.]+)">\n')
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
        if "slices" in options_of(schedule):
            yield {"schedule": schedule, "slices": "2"}
        if "chunks" in options_of(schedule):
            yield from ({"schedule": schedule, "chunks": str(chunks)} for chunks in range(1, 5))


def costs() -> Iterator[Fields]:
    """Every schedule, and those of the tour side by side, with what the sliders of costs set one at a time."""
    shown = [*SCHEDULES, *dict.fromkeys(fields["schedule"] for fields in tour() if "," in fields["schedule"])]
    for field in ("backward_weight", "latency"):
        _, most, step = SLIDERS[field]
        for schedule in shown:
            yield from ({"schedule": schedule, field: f"{each * step:g}"} for each in range(round(most / step) + 1))


def pairs() -> Iterator[Fields]:
    """Every schedule beside the one that its headline compares it with, as the slider above them shows it."""
    for schedule in SCHEDULES:
        for microbatches in ("4", "8", "12"):
            fields = {"schedule": schedule, "microbatches": microbatches}
            state = State.of(fields)
            other = headline(state, [state.timeline(schedule)])["other"]
            yield fields | {"schedule": f"{schedule},{other}"}


@cache
def drawn() -> list[Fields]:
    """All states, without those that cannot be drawn."""
    found = {name(fields): fields for states in (sizes(), pairs(), costs(), tour()) for fields in states}
    return [fields for fields in found.values() if _is_drawn(fields)]


def _is_drawn(fields: Fields) -> bool:
    try:
        state = State.of(fields)
        for each in state.schedules:
            state.timeline(each)
    except UsageError:
        return False
    return True


def prebuilt(states: Mapping[str, Sequence[Fields]], sliders: Mapping[str, Range]) -> str:
    """The text of the page.

    Args:
        states: per question, the fields of the links whose answers it has.
        sliders: the range of each slider. Fields without one, other than the schedule, have no control.

    Raises UsageError for a state that cannot be shown.
    """
    answers = {question: {name(each): ANSWERS[question](each) for each in asked} for question, asked in states.items()}
    served = {each: content.decode() for each, (_, content) in page_files().items()}
    script = bundle("explore", lambda module: served["prebuilt.js" if module == "server" else f"{module}.js"])
    page = document([_described(field, sliders) for field in ALL])
    for place, text in {
        CHARSET: CHARSET + POLICY.format(policy(script)),
        FORM: FORM + NOTE.format(count=max(map(len, answers.values()))),
        PROGRAM: "",
        END: ANSWERED.format(_packed(answers)) + f"<script>{script}</script>\n{END}",
    }.items():
        page = page.replace(place, text)
    return SHEET.sub(lambda match: f"<style>\n{served[match[1]]}</style>\n", page)


def name(fields: Fields) -> str:
    """The name of the answer for `fields`; the page makes the same one. Raises KeyError for an unknown field."""
    values = {each: text or FIELDS[each].default for each, text in fields.items()}
    names = values.get("schedule", FIELDS["schedule"].default).split(",")
    given = (each for each in ASKED if values.get(each.name, each.default) != each.default)
    return "&".join(
        f"{each.name}={values[each.name]}"
        for each in given
        if not each.takers or {*each.takers} & {*names} or values.get(each.beside)
    )


def _described(field: Field, sliders: Mapping[str, Range]) -> dict[str, Any]:
    """A field with the range of its slider; without a group, and so without a control, if it has none."""
    described = field._asdict() | {"asked": field in ASKED}
    if field.name in sliders:
        described |= dict(zip(("least", "most", "step"), sliders[field.name], strict=True))
    elif field.name != "schedule":
        described["group"] = ""
    return described


def _packed(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """The answers as compressed JSON, in base64. Each timeline is there once, since states side by side show others."""
    numbers: dict[str, int] = {}

    def numbered(plan: Mapping[str, Any]) -> dict[str, Any]:
        places = [numbers.setdefault(json.dumps(each), len(numbers)) for each in plan["data"]["timelines"]]
        return {**plan, "data": plan["data"] | {"timelines": places}}

    told = dict(answers) | {"plan": {state: numbered(plan) for state, plan in answers["plan"].items()}}
    text = json.dumps([told, [json.loads(each) for each in numbers]], separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


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
