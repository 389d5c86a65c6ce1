"""Document: the page of the explorer and the files that it loads, from the folders `draw/page` and `explore/page`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files as resources
from string import Template
from typing import Any

from pipeflow.draw.page.timeline_page import as_script_text, file, variables
from pipeflow.explore.fields import ALL
from pipeflow.explore.tour import STEPS

KINDS = {"js": "text/javascript", "css": "text/css"}
DESCRIBED = tuple(each._asdict() for each in ALL)
FOLDERS = ("pipeflow.draw", "pipeflow.explore")  # whose folder `page` has modules and style sheets


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
    text = resources("pipeflow.explore").joinpath("page", "explore.html").read_text(encoding="utf-8")
    return Template(text).substitute(
        bar=file("bar.html"),
        fields=as_script_text([*fields]),
        tour=as_script_text([each.as_json() for each in STEPS]),
    )
