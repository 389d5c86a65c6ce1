"""Data: the data and the tables of a page. Every number, name and colour that its modules show comes from here. Must
not contain: how a page is put together.
"""

from __future__ import annotations

import colorsys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import IDLE, SENTENCES, Cause, causes, critical_path
from pipeflow.core.analysis.measures import utilisations
from pipeflow.core.dataflow import DATAFLOW, PASSING, SEVERAL, VALUE, Content, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.text import percent
from pipeflow.core.timeline import Row, Span, Timeline
from pipeflow.draw.captions import Unit, amount_text, escaped, heading, peaks, unit_of
from pipeflow.draw.colours import RGB, between, css, shade
from pipeflow.draw.lane_times import Lane, all_lanes, heights, kinds, num_chunks, shortest
from pipeflow.draw.page.glossary import GLOSSARY, tip_of

MODES = "kind", "chunk", "microbatch"  # what colours can stand for
MOST = 64  # colours of microbatches; then they begin again
WHITE = (255.0, 255.0, 255.0)
HUES = 16
TURN = 7  # hues from one number to the next, which are far apart; all hues come before the first one comes again
LUMINANCES = 0.5, 0.25, 0.72, 0.36  # in turn; text in the ink has a contrast of at least 5 on all of them
LIGHTER = 0.0, 0.3, 0.52  # the white in what begins a microbatch, in what passes it back, and in the rest


def palettes(kind: Kind, chunks: int, microbatches: int) -> dict[str, list[str]]:
    """Per mode, the colours of a kind of action: one per chunk, or one per microbatch of which `MOST` differ."""
    own = [shade(kind, chunk, chunks) for chunk in range(chunks)]
    if DATAFLOW[kind].stream is not Stream.COMPUTE:  # a reduction belongs to no microbatch
        return {"kind": own, "chunk": own, "microbatch": own[:1]}
    return {
        "kind": own,
        "chunk": [css(between(WHITE, _varied(chunk % HUES, 1), LIGHTER[_part(kind)])) for chunk in range(chunks)],
        "microbatch": [css(_varied(number, 4)) for number in range(min(microbatches, MOST))],
    }


def legend(timelines: tuple[Timeline, ...]) -> Iterator[tuple[str, str]]:
    """The entries for the colours of blocks as HTML, each with its mode."""
    chunks = max(map(num_chunks, timelines))
    present = kinds(timelines)
    for kind in present:
        yield "kind", _entry(kind, [shade(kind, chunk, chunks) for chunk in range(chunks)], DATAFLOW[kind].name)
    ways = _ways(timelines)
    if chunks > 1:
        is_v = chunks == 2 and any(ways)
        yield "kind", "darker: chunk 0 (down), lighter: chunk 1 (up)" if is_v else "lighter: later chunk"
    computing = [kind for kind in present if DATAFLOW[kind].stream is Stream.COMPUTE]
    beside = [kind for kind in present if kind not in computing]
    microbatches = max(timeline.num_microbatches for timeline in timelines)
    of_chunks = [palettes(kind, chunks, 1)["chunk"] for kind in computing]
    for chunk in range(chunks):
        yield "chunk", f"{_swatches([colours[chunk] for colours in of_chunks])} chunk {chunk}{ways[chunk % 2]}"
    yield "chunk", ", ".join(DATAFLOW[kind].name for kind in computing)
    few = min(microbatches, 16)
    if computing:
        names = f"microbatches 0 to {few - 1}" if few > 1 else "microbatch 0"
        yield "microbatch", f"{_swatches(palettes(Kind.F, 1, few)['microbatch'])} {names}"
    if microbatches > MOST:
        yield "microbatch", f"the same colour again after {MOST}"
    for mode in ("chunk", "microbatch"):
        for kind in beside:
            yield mode, _entry(kind, palettes(kind, chunks, 1)[mode], DATAFLOW[kind].name)


def _ways(timelines: tuple[Timeline, ...]) -> tuple[str, str]:
    """How even and odd chunks go through the ranks, if all chunks go down and up in turn; else nothing."""
    placements = {timeline.placement for timeline in timelines} - {Placement.linear(len(timelines[0].rows))}
    waves = [(each, max(each.num_stages // (2 * each.num_ranks), 1)) for each in placements]
    is_v = bool(waves) and all(each == Placement.zigzag(each.num_ranks, number) for each, number in waves)
    return (" (down)", " (up)") if is_v else ("", "")


def _entry(kind: Kind, colours: list[str], name: str) -> str:
    low = "" if DATAFLOW[kind].stream is Stream.COMPUTE else ' class="beside"'
    return f"{_swatches(colours, low)} {name}"


def _swatches(colours: list[str], attribute: str = "") -> str:
    return "".join(f'<i{attribute} style="background:{colour}"></i>' for colour in colours)


def _part(kind: Kind) -> int:
    """0 for what passes on activations, 1 for what passes on gradients, 2 for the rest."""
    steps = [PASSING[content] for content, _ in DATAFLOW[kind].makes if content in PASSING]
    return 2 if not steps else 0 if max(steps) > 0 else 1


@lru_cache(4 * HUES)
def _varied(number: int, levels: int) -> RGB:
    """The colour of a number. Neighbours differ in hue, and in luminance if there are several levels of it."""
    aim = LUMINANCES[(number + number // HUES) % levels]
    red, green, blue = colorsys.hsv_to_rgb((9.5 + number * TURN) % HUES / HUES, 0.8, 1.0)
    pale = _mixed_until((red, green, blue), (1.0, 1.0, 1.0), lambda colour: _luminance(colour) >= aim)
    red, green, blue = _mixed_until(pale, (0.0, 0.0, 0.0), lambda colour: _luminance(colour) <= aim)
    return red * 255, green * 255, blue * 255


def _mixed_until(colour: RGB, other: RGB, enough: Callable[[RGB], bool]) -> RGB:
    """A colour mixed with as little of another one as is enough."""
    steps = (between(other, colour, percent / 100) for percent in range(101))
    return next(filter(enough, steps))


def _luminance(colour: RGB) -> float:
    """The relative luminance of a colour whose parts are from 0 to 1, as WCAG defines it."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def measures_table(timelines: tuple[Timeline, ...], unit: Unit) -> str:
    """A table with one line per timeline."""
    rows = [
        (
            heading(timeline),
            unit.text(timeline.makespan),
            unit.text(timeline.span),
            unit.text(timeline.work),
            percent(timeline.makespan_bubble_ratio),
            percent(timeline.bubble_ratio),
            f"{amount_text(timeline, max(peaks(timeline)))}{'' if timeline.saved_bytes else ' activations'}",
        )
        for timeline in timelines
    ]
    head = ("timeline", "makespan", "span", "work of the busiest rank", "bubble", "bubble of span", "peak")
    return table("Measures", head, rows)


def ranks_table(timeline: Timeline, unit: Unit) -> str:
    """A table with one line per rank: when it computes, when its other streams end, and its peak."""
    drawn, most = all_lanes(timeline), peaks(timeline)
    rows = [
        (lanes[0].name, *_computing(lanes[0].row, unit), *_ends(lanes[1:], unit), amount_text(timeline, peak))
        for lanes, peak in zip(drawn, most, strict=True)
    ]
    beside = [f"last end of {lane.name}" for lane in drawn[0][1:]]
    head = ("rank", "actions", "first start", "last end", "busy", "idle between", *beside, f"peak {unit_of(timeline)}")
    ranks = table(heading(timeline), head, rows)
    return f'<details class="ranks"><summary>Ranks of {escaped(heading(timeline))}</summary>{ranks}</details>'


def _computing(row: Row, unit: Unit) -> list[str]:
    """The number of computations, the start of the first, the end of the last, their total time, and the idle time
    between them.
    """
    first, last = (row[0].start, row[-1].end) if row else (0.0, 0.0)
    busy = sum(span.end - span.start for span in row)
    return [str(len(row)), *map(unit.text, (first, last, busy, last - first - busy))]


def _ends(lanes: Sequence[Lane], unit: Unit) -> list[str]:
    return [unit.text(max((span.end for span in lane.row), default=0.0)) for lane in lanes]


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a caption, the titles of its columns, and its lines; the first cell of each line is its title."""
    titles = "".join(f'<th scope="col"{tip_of(title)}>{escaped(title)}</th>' for title in head)
    lines = "".join(
        f'<tr><th scope="row"{tip_of(first)}>{escaped(first)}</th>'
        f"{''.join(f'<td>{escaped(cell)}</td>' for cell in rest)}</tr>\n"
        for first, *rest in rows
    )
    return (
        f'<div class="tables"><table><caption><span>{escaped(caption)}</span></caption>'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>\n{lines}</tbody></table></div>\n"
    )


CONTENTS = list(Content)
Cap = float | Sequence[float] | None
FIND = {
    "none": "nothing matches {text}",
    "form": "write an action such as 2F0, a part of one such as 2F or F0, or rank, stage, chunk or microbatch with its "
    "number",
}


def page_data(timelines: tuple[Timeline, ...], unit: Unit, cap: Cap = None) -> dict[str, Any]:
    """The data of a page for `timelines`, as JSON values. `cap` is the most that a rank should keep, one number or one
    per rank, in the unit of `Timeline.memory`. Raises UsageError if there is not one for each rank.
    """
    chunks = max(map(num_chunks, timelines))
    microbatches = max(timeline.num_microbatches for timeline in timelines)
    return {
        "unit": unit.name,
        "factor": unit.factor,
        "shortest": shortest(timelines),
        "kinds": {kind.value: _kind_data(kind, chunks, microbatches) for kind in Kind},
        "sentences": {**SENTENCES, **IDLE, "value": VALUE},
        "find": FIND,
        "margin": f"{GLOSSARY['busy']} Below it: {GLOSSARY['peak'][0].lower()}{GLOSSARY['peak'][1:]}",
        "contents": CONTENTS,
        "timelines": [_timeline(timeline, _caps(timeline, cap)) for timeline in timelines],
    }


def _caps(timeline: Timeline, cap: Cap) -> Sequence[float]:
    """The cap of each rank; empty: none."""
    ranks = len(timeline.rows)
    if cap is None or isinstance(cap, int | float):
        return () if cap is None else (cap,) * ranks
    if len(cap) != ranks:
        raise UsageError(f"the memory cap has {len(cap)} numbers for {ranks} ranks: give one number, or one per rank")
    return cap


def _kind_data(kind: Kind, chunks: int, microbatches: int) -> dict[str, Any]:
    """`colours`: per mode. `passes`: whether other stages wait for it. `single`: whether it belongs to one microbatch
    alone. `counts`: what the number in its name is.
    """
    flow = DATAFLOW[kind]
    return {
        "name": flow.name,
        "stream": flow.stream,
        "colours": palettes(kind, chunks, microbatches),
        "passes": any(content in PASSING for content, _ in flow.makes),
        "single": kind not in SEVERAL,
        "counts": "last microbatch" if flow.joint else "number" if kind in SEVERAL else "microbatch",
    }


def _timeline(timeline: Timeline, caps: Sequence[float]) -> dict[str, Any]:
    drawn, most, levels = all_lanes(timeline), peaks(timeline), _levels(timeline)
    level = {amount: index for index, amount in enumerate(levels)}
    highest = max([0.0, *most, *caps])
    return {
        "makespan": _short(timeline.makespan),
        "streams": [lane.stream for lane in drawn[0]],
        "highest": _short(highest),
        "scale": amount_text(timeline, highest),
        "levels": [[_short(amount), text] for amount, text in levels.items()],
        "heights": heights(len(drawn), bool(caps))._asdict(),
        "path": [_place(timeline, cause.span) for cause in critical_path(timeline)],
        "rows": [
            {
                **_row(timeline.rows[rank]),
                "names": [lane.name for lane in lanes],
                "chunks": _chunks(timeline, rank),
                "causes": [*_causes(timeline, why)],
                "memory": [(_short(time), level[amount]) for time, amount in timeline.memory(rank)],
                "peak": amount_text(timeline, most[rank]),
                "used": percent(used),
                "cap": _cap(timeline, caps[rank], most[rank], level) if caps else None,
            }
            for rank, (lanes, why, used) in enumerate(zip(drawn, causes(timeline), utilisations(timeline), strict=True))
        ],
    }


def _chunks(timeline: Timeline, rank: int) -> dict[int, int]:
    """Per stage in the row of a rank, its chunk: that on the rank that holds it, or 0 if there is no such stage."""
    placement = timeline.placement
    held = {stage: chunk for chunk, stage in enumerate(placement.stages_of(rank))}
    others = {span.action.stage for span in timeline.rows[rank]} - held.keys()
    return held | {stage: placement.chunk_of(stage) if stage < placement.num_stages else 0 for stage in others}


def _cap(timeline: Timeline, cap: float, peak: float, level: dict[float, int]) -> dict[str, Any]:
    """A rank's cap, and for each level above it the words that say by how much."""
    text, unit = amount_text(timeline, cap), _counted(timeline)
    above = {
        index: f"{amount_text(timeline, amount - cap)}{unit} above the cap of {text}"
        for amount, index in level.items()
        if cap * (1 + 1e-9) < amount <= peak
    }
    return {"amount": _short(cap), "text": f"cap {text}", "above": above}


def _row(row: Row) -> dict[str, Any]:
    """The actions with their times, and the indices of both actions of each pair."""
    index = {span.action: position for position, span in enumerate(row)}
    pairs = [(index[span.action], index[span.partner]) for span in row if span.partner in index]
    return {
        "actions": " ".join(str(span.action) for span in row),
        "times": [_short(time) for span in row for time in (span.start, span.end)],
        "pairs": [pair for pair in pairs if pair[0] < pair[1]],
    }


def _causes(timeline: Timeline, row: Sequence[Cause]) -> Iterator[tuple[int, ...]]:
    """For each span whose cause is not the span before it on its stream: its index; rank and index of the span that it
    started after, unless it started at once; content, stage, microbatch and, if it has one, slice of the value that it
    waited for, if any.
    """
    before: dict[Stream, Span] = {}
    for index, (span, after, value) in enumerate(row):
        if value is not None or after is not before.get(span.stream):
            place = () if after is None else _place(timeline, after)
            waited = () if value is None else (CONTENTS.index(value.content), value.stage, value.microbatch)
            if value is not None and value.slice is not None:
                waited = (*waited, value.slice)
            yield index, *place, *waited
        before[span.stream] = span


def _place(timeline: Timeline, span: Span) -> tuple[int, int]:
    """The rank of a span, and its index in the rank's row."""
    row = timeline.rows[span.rank]
    index = bisect_left(row, span.start, key=attrgetter("start"))
    while row[index] is not span:
        index += 1
    return span.rank, index


def _levels(timeline: Timeline) -> dict[float, str]:
    """All amounts that a rank keeps at some time, and their text."""
    curves = (timeline.memory(rank) for rank in range(len(timeline.rows)))
    amounts = dict.fromkeys((0.0, *(amount for curve in curves for _, amount in curve)))
    counted = _counted(timeline)
    return {amount: f"{amount_text(timeline, amount)}{counted}" for amount in amounts}


def _counted(timeline: Timeline) -> str:
    """The word behind an amount; bytes have their unit in the amount."""
    return "" if timeline.saved_bytes else f" {unit_of(timeline)}"


@lru_cache(1 << 16)
def _short(number: float) -> float:
    """A number, rounded to nine digits and written in as few characters as possible."""
    rounded = float(f"{number:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
