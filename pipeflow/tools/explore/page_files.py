"""Document: the page of the explorer and the files that it loads, from the folders `draw/page` and `explore/page`; and
the explorer as one file that loads nothing and needs no server, with the answers for given states in itself.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files as resources
from string import Template
from typing import Any

from pipeflow.draw.page.timeline_page import as_script_text, bundle, file, policy, variables
from pipeflow.tools.explore.answers import ANSWERS
from pipeflow.tools.explore.fields import ALL, FIELDS, Field
from pipeflow.tools.explore.tour import STEPS

KINDS = {"js": "text/javascript", "css": "text/css"}
DESCRIBED = tuple(each._asdict() for each in ALL)
FOLDERS = ("pipeflow.draw", "pipeflow.tools.explore")  # whose folder `page` has modules and style sheets


def files() -> dict[str, tuple[str, bytes]]:
    """The files of the page: per name its type and its content. The page itself has an empty name."""
    found = {"": ("text/html", document().encode())}
    for folder in FOLDERS:
        for each in resources(folder).joinpath("page").iterdir():
            kind = each.name.rpartition(".")[2]
            if kind in KINDS:
                found[each.name] = KINDS[kind], each.read_bytes()
    red = variables().replace("--accent", "--fault")  # explore.css has another accent
    found["page.css"] = KINDS["css"], (red + file("page.css")).encode()
    return found


def document(fields: Iterable[Mapping[str, Any]] = DESCRIBED) -> str:
    """The page itself, with controls for `fields`."""
    text = resources("pipeflow.tools.explore").joinpath("page", "explore.html").read_text(encoding="utf-8")
    return Template(text).substitute(
        bar=file("bar.html"), fields=as_script_text([*fields]), tour=as_script_text([each.as_json() for each in STEPS])
    )


Fields = Mapping[str, str]
Range = tuple[float, float, float]  # least, most and step of a slider

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


def prebuilt(states: Mapping[str, Sequence[Fields]], sliders: Mapping[str, Range]) -> str:
    """The text of the page.

    Args:
        states: per question, the fields of the links whose answers it has.
        sliders: the range of each slider. Fields without one, other than the schedule, have no control.

    Raises UsageError for a state that cannot be shown.
    """
    answers = {question: {name(each): ANSWERS[question](each) for each in asked} for question, asked in states.items()}
    served = {each: content.decode() for each, (_, content) in files().items()}
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


def _packed(answers: object) -> str:
    """The answers as compressed JSON, in base64."""
    return base64.b64encode(gzip.compress(json.dumps(answers, separators=(",", ":")).encode(), 9, mtime=0)).decode()
