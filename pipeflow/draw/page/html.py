"""html: timelines as one page that needs nothing else. What it looks like and does is in the files of `page/`; here is
what is written into them.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from itertools import pairwise
from string import Template
from typing import Any

from pipeflow.analysis.causes import Cause, causes, critical_path
from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Stream
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline
from pipeflow.draw.files.frame import heights
from pipeflow.draw.layout import computations, num_chunks, shortest
from pipeflow.draw.looks import (
    DARK,
    INK,
    LIGHT,
    Scheme,
    chunks_of,
    escaped,
    kinds,
    several,
    shade,
)
from pipeflow.draw.measures import Unit, heading, measures
from pipeflow.draw.memory import amount_text, peaks, unit_of
from pipeflow.draw.painters import NAMES

SCRIPTS = ("model.js", "paint.js", "tell.js", "page.js", "input.js")


def html(timelines: Timeline | Sequence[Timeline], *, unit: str = "", factor: float = 1.0) -> str:
    """A page with the timelines above each other on one time scale: it zooms, says of every block what it waited for,
    shows the critical path, and follows a microbatch through the ranks. One file, without a network.

    All timelines are in the same unit of time; times are written multiplied by `factor` and followed by `unit`.
    Raises UsageError when there is no timeline.
    """
    drawn = several(timelines)
    times = Unit(unit, factor)
    script = '"use strict";\n' + "\n".join(_file(name) for name in SCRIPTS)
    return Template(_file("page.html")).substitute(
        policy=_policy(script),
        title=escaped("; ".join(map(heading, drawn))),
        style=_variables() + _file("page.css"),
        legend="\n".join(f"<li>{entry}</li>" for entry in _legend(drawn)),
        charts="\n".join(_chart(timeline, times) for timeline in drawn),
        tables=_measures_table(drawn, times) + "".join(_ranks_table(timeline, times) for timeline in drawn),
        data=_as_script_text(_data(drawn, times)),
        script=script,
    )


def _file(name: str) -> str:
    return files("pipeflow.draw.page").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """The page loads nothing, and runs no script but its own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _as_script_text(data: object) -> str:
    """JSON in which nothing can end the element that holds it."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _variables() -> str:
    def block(selector: str, scheme: Scheme) -> str:
        return selector + "{" + ";".join(f"--{name}:{colour}" for name, colour in asdict(scheme).items()) + "}"

    return (
        f":root{{color-scheme:light dark}}{block(':root', LIGHT)}\n"
        f"@media (prefers-color-scheme:dark){{{block(':root', DARK)}}}\n{block(':root.printing', LIGHT)}\n"
        f"@media print{{{block(':root', LIGHT)}}}\n"
    )


def _data(timelines: tuple[Timeline, ...], unit: Unit) -> dict[str, Any]:
    chunks = max(map(num_chunks, timelines))
    return {
        "unit": unit.name,
        "factor": unit.factor,
        "shortest": shortest(span for timeline in timelines for span in computations(timeline)),
        "ink": INK,
        "kinds": NAMES,
        "colours": {kind: [shade(kind, chunk, chunks) for chunk in range(chunks)] for kind in Kind},
        "timelines": [_timeline(timeline) for timeline in timelines],
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    computed, reduced = timeline.on(Stream.COMPUTE), timeline.on(Stream.REDUCE)
    rows = [(*row, *reductions) for row, reductions in zip(computed, reduced, strict=True)]
    places = {span: (span.rank, index) for row in rows for index, span in enumerate(row)}  # reductions come last
    why = {cause.span: cause for row in causes(timeline) for cause in row}
    most = peaks(timeline)
    return {
        "makespan": _short(timeline.makespan),
        "memory": unit_of(timeline),
        "highest": _short(max(most)),
        "heights": heights(len(timeline.rows))._asdict(),
        "path": [places[cause.span] for cause in critical_path(timeline)],
        "rows": [
            {
                "actions": " ".join(str(span.action) for span in row),
                "times": [_short(time) for span in row for time in (span.start, span.end)],
                "chunks": chunks_of(timeline, rank),
                "pairs": [index for index, (one, other) in enumerate(pairwise(row)) if one.partner == other.action],
                "waits": [_wait(why[span], places) for span in row if why[span].value],
                "memory": [_short(number) for step in timeline.memory(rank) for number in step],
                "peak": amount_text(timeline, most[rank]),
                **({"reductions": _reductions(reduced[rank], why, places)} if any(reduced) else {}),
            }
            for rank, row in enumerate(computed)
        ],
    }


Places = dict[Span, tuple[int, int]]


def _reductions(row: Row, why: dict[Span, Cause], places: Places) -> dict[str, Any]:
    """A rank's reductions, each with the place of what it began after."""
    causes = [why[span] for span in row]
    return {
        "actions": " ".join(str(span.action) for span in row),
        "times": [_short(time) for span in row for time in (span.start, span.end)],
        "after": [cause.after and places[cause.after] for cause in causes],
        "waits": [_wait(cause, places) for cause in causes if cause.value],
    }


def _wait(cause: Cause, places: Places) -> tuple[int | str, ...]:
    """The index of a span that waited, the rank and index of the one that it waited for, and the value."""
    assert cause.after is not None
    assert cause.value is not None
    content, stage, microbatch = cause.value
    return places[cause.span][1], *places[cause.after], content.value, stage, microbatch


def _short(number: float) -> float:
    """A number in as few letters as nine digits take."""
    rounded = float(f"{number:.9g}")
    return int(rounded) if rounded.is_integer() else rounded


def _legend(timelines: tuple[Timeline, ...]) -> Iterator[str]:
    chunks = max(map(num_chunks, timelines))
    for kind in kinds(timelines):
        bar = ' class="reduction"' if kind is Kind.R else ""
        swatches = "".join(f'<i{bar} style="background:{shade(kind, chunk, chunks)}"></i>' for chunk in range(chunks))
        yield f"{swatches} {NAMES[kind]}"
    if chunks > 1:
        yield "lighter: later chunk"
    if any(span.partner for timeline in timelines for span in timeline):
        yield '<i class="pair"></i> overlapped pair'
    yield '<i class="idle"></i> idle'
    for counted in dict.fromkeys(map(unit_of, timelines)):
        yield f'<i class="memory"></i> {counted} kept for backwards, a dot at their peak'


def _chart(timeline: Timeline, unit: Unit) -> str:
    title, said = escaped(heading(timeline)), escaped(measures(timeline, unit))
    parts = "".join(f"<span>{part}</span>" for part in said.split("  "))
    return (
        f'<section>\n<h2>{title}</h2>\n<p class="said">{parts}</p>\n'
        '<div class="chart"><canvas class="axis" aria-hidden="true"></canvas>'
        '<canvas class="lanes" tabindex="0" role="application" aria-roledescription="timeline"'
        f' aria-label="{title}: {said}" aria-describedby="keys"></canvas></div>\n</section>'
    )


def _measures_table(timelines: tuple[Timeline, ...], unit: Unit) -> str:
    rows = [
        (
            heading(timeline),
            unit.text(timeline.makespan),
            unit.text(timeline.span),
            unit.text(timeline.work),
            f"{timeline.bubble_ratio:.1%}",
            f"{amount_text(timeline, max(peaks(timeline)))}{'' if timeline.saved_bytes else ' activations'}",
        )
        for timeline in timelines
    ]
    return _table("Measures", ("timeline", "makespan", "span", "work of the busiest rank", "bubble", "peak"), rows)


def _ranks_table(timeline: Timeline, unit: Unit) -> str:
    most = peaks(timeline)
    rows = []
    reduced = timeline.on(Stream.REDUCE)
    for rank, row in enumerate(timeline.on(Stream.COMPUTE)):
        first, last = (row[0].start, row[-1].end) if row else (0.0, 0.0)
        busy = sum(span.end - span.start for span in row)
        times = [unit.text(time) for time in (first, last, busy, last - first - busy)]
        if any(reduced):
            times.append(unit.text(max((span.end for span in reduced[rank]), default=0.0)))
        rows.append((f"rank {rank}", str(len(row)), *times, amount_text(timeline, most[rank])))
    columns = ("rank", "actions", "first start", "last end", "busy", "idle between", *["reduced"] * any(reduced))
    head = (*columns, f"peak {unit_of(timeline)}")
    table = _table(heading(timeline), head, rows)
    return f'<details class="ranks"><summary>Ranks of {escaped(heading(timeline))}</summary>{table}</details>'


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{escaped(title)}</th>' for title in head)
    lines = "".join(
        f'<tr><th scope="row">{escaped(first)}</th>{"".join(f"<td>{escaped(cell)}</td>" for cell in rest)}</tr>\n'
        for first, *rest in rows
    )
    return (
        f'<div class="tables"><table><caption>{escaped(caption)}</caption><thead><tr>{titles}</tr></thead>\n'
        f"<tbody>\n{lines}</tbody></table></div>\n"
    )
