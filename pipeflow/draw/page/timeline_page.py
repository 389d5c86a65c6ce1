"""html: timelines as one page that loads nothing. Its look and behaviour are in the files beside this one, ES modules
that are joined into one script here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit, escaped, heading, summary, unit_of
from pipeflow.draw.colours import DARK, INK, LIGHT, Scheme
from pipeflow.draw.lane_times import several
from pipeflow.draw.page.glossary import tip_of
from pipeflow.draw.page.timeline_data import Cap, legend, measures_table, page_data, ranks_table

IMPORT = re.compile(r'^import \{([\w, ]+)\} from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:const|function|class) (\w+))", re.MULTILINE)


def bundle(entry: str, read: Callable[[str], str]) -> str:
    r"""The module `entry` and the modules that it imports, each in a function of its own, after those that it needs.

    `read` returns the text of a module by its name. Modules import names from modules beside them, in one line, and
    export constants, functions and classes.

    >>> modules = {"one": "export const x = 1;", "two": 'import {x} from "./one.js";\nalert(x);'}
    >>> print(bundle("two", modules.__getitem__))
    "use strict";
    const modules = {};
    modules.one = (() => {
    const x = 1;
    return {x};
    })();
    modules.two = (() => {
    const {x} = modules.one;
    alert(x);
    return {};
    })();
    """
    wrapped: dict[str, str] = {}

    def add(name: str) -> None:
        text = read(name)
        for _, needed in IMPORT.findall(text):
            if needed not in wrapped:
                add(needed)
        wrapped[name] = _wrapped(name, text)

    add(entry)
    return "\n".join(['"use strict";\nconst modules = {};', *wrapped.values()])


def _wrapped(name: str, text: str) -> str:
    """A module as a function that runs once and returns its exports."""
    exports = ", ".join(EXPORT.findall(text))
    body = EXPORT.sub("", IMPORT.sub(r"const {\1} = modules.\2;", text))
    return f"modules.{name} = (() => {{\n{body.rstrip()}\nreturn {{{exports}}};\n}})();"


def html(
    timelines: Timeline | Sequence[Timeline],
    *,
    unit: str = "",
    factor: float = 1.0,
    critical_path: bool = False,
    memory_cap: Cap = None,
) -> str:
    """The timelines as the text of an HTML page, one above the other on one time scale. The page zooms, shows for every
    block what it waited for, marks the critical path, and follows a microbatch through the ranks. It is one file and
    needs no network.

    Args:
        timelines: one timeline or several, in the same unit of time.
        unit, factor: times are written multiplied by `factor` and followed by `unit`. Default: a readable unit for
            timelines in seconds.
        critical_path: whether the critical path is marked when the page opens.
        memory_cap: the most that a rank should keep, one number or one per rank, in bytes if the timelines have them
            and in activations otherwise. It is drawn as a line, and what is above it has another colour.

    Raises UsageError for an empty sequence of timelines, and for caps that are not one per rank.
    """
    drawn = several(timelines)
    written = Unit.of(drawn, unit, factor)
    shown = parts(drawn, written, memory_cap)
    script = _program()
    return Template(file("page.html")).substitute(
        policy=policy(script),
        bar=file("bar.html"),
        title=shown.title,
        style=variables() + file("page.css"),
        legend=shown.legend,
        charts=shown.charts,
        tables=shown.tables + "".join(ranks_table(timeline, written) for timeline in drawn),
        data=as_script_text(shown.data | {"marked": critical_path}),
        script=script,
    )


class PageParts(NamedTuple):
    """The parts of a page that depend on its timelines; all but `data` are HTML.

    Attributes:
        title: the headings of the timelines.
        legend: the entries of the legend.
        charts: one section per timeline.
        tables: the measures of the timelines.
        data: what the modules of the page read.
    """

    title: str
    legend: str
    charts: str
    tables: str
    data: dict[str, Any]


def parts(timelines: tuple[Timeline, ...], unit: Unit, cap: Cap = None) -> PageParts:
    """The parts of a page for `timelines`, with the most that a rank should keep if that is given. Raises UsageError
    for caps that are not one per rank.
    """
    return PageParts(
        title=escaped("; ".join(map(heading, timelines))),
        legend="\n".join(_legend(timelines, cap is not None)),
        charts="\n".join(_chart(timeline, unit) for timeline in timelines),
        tables=measures_table(timelines, unit),
        data=page_data(timelines, unit, cap),
    )


@cache
def _program() -> str:
    """The script of the page."""
    return bundle("main", lambda name: file(f"{name}.js"))


def file(name: str) -> str:
    """The text of a file of the page."""
    return files("pipeflow.draw.page").joinpath(name).read_text(encoding="utf-8")


def policy(script: str) -> str:
    """The content security policy: the page loads nothing, and runs no script but its own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def as_script_text(data: object) -> str:
    """JSON in which no text can end the element that holds it."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def variables() -> str:
    """The colours of surfaces and of text as variables of a style sheet, in both schemes."""

    def block(selector: str, scheme: Scheme) -> str:
        colours = scheme._asdict() | {"ink": INK}
        return selector + "{" + ";".join(f"--{name}:{colour}" for name, colour in colours.items()) + "}"

    return (
        f":root{{color-scheme:light dark}}{block(':root', LIGHT)}\n"
        f"@media (prefers-color-scheme:dark){{{block(':root', DARK)}}}\n{block(':root.printing', LIGHT)}\n"
        f"@media print{{{block(':root', LIGHT)}}}\n"
    )


def _legend(timelines: tuple[Timeline, ...], capped: bool) -> Iterator[str]:
    for mode, entry in legend(timelines):
        yield _entry(entry, f"by-{mode}")
    entries = []
    if any(span.partner for timeline in timelines for span in timeline):
        entries.append('<i class="pair"></i> overlapped pair')
    entries.append('<i class="idle"></i> idle')
    units = dict.fromkeys(map(unit_of, timelines))
    entries += [f'<i class="memory"></i> {counted} kept for backwards, dot = peak' for counted in units]
    if capped:
        entries.append('<i class="cap"></i> memory cap, <i class="above"></i> above it')
    yield from map(_entry, entries)


def _entry(entry: str, more: str = "") -> str:
    """An entry of the legend, with the meaning of its word."""
    return f"<li{tip_of(entry.rpartition('</i> ')[2], more)}>{entry}</li>"


def _chart(timeline: Timeline, unit: Unit) -> str:
    title, said = escaped(heading(timeline)), escaped(summary(timeline, unit))
    parts = "".join(f"<span{tip_of(part)}>{part}</span>" for part in said.split("  "))
    return (
        f'<section>\n<h2>{title}</h2>\n<p class="said">{parts}</p>\n'
        '<div class="chart"><canvas class="axis" aria-hidden="true"></canvas>'
        '<canvas class="lanes" tabindex="0" role="application" aria-roledescription="timeline"'
        f' aria-label="{title}: {said}" aria-describedby="keys"></canvas></div>\n</section>'
    )
