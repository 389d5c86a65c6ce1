"""svg: a timeline as a standalone SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import critical_path as find_path
from pipeflow.core.cost import SMALLEST
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.timeline import Curve, Row, Span, Timeline
from pipeflow.draw.captions import Unit, amount_text, escaped, heading, peaks, round_step, summary, unit_of
from pipeflow.draw.colours import DARK, INK, LIGHT, Scheme, average, css, shade
from pipeflow.draw.lane_times import (
    SPACE,
    Heights,
    Lane,
    Line,
    Mixture,
    fit,
    heights,
    kinds,
    lanes,
    num_chunks,
    pieces,
    shortest,
)

MOST = 5000  # most blocks that are elements of their own
FINEST = 2.0  # pixels: least mean width of blocks that are elements of their own, and of steps otherwise
SHOWN = 3  # least spans per column: with fewer, the kind that a column shows is left to chance
PAD = 16
AVERAGED = "There are more actions than columns: each column has the average colour of its actions, fainter where idle."
NUMBERS = (("number", 7.0), ("number tight", 5.2))  # the classes of a number, and the largest width of its digits


def svg(timeline: Timeline, *, unit: str = "", factor: float = 1.0, critical_path: bool = False) -> str:
    """The timeline as the text of an SVG document, which scales and follows the reader's dark scheme.

    There is one lane per rank: the hue is the kind of action, the shade the chunk, the number the microbatch. Below
    each lane is the memory that the rank keeps for its backwards, with a dot at its peak. Each stream beside the
    computations, such as gradient reductions, has a lower lane of its own.

    If a picture cannot show each block, columns show the average colour of their blocks, and a line says so. So the
    size of the document is bounded.

    Args:
        timeline: the timeline.
        unit, factor: times are written multiplied by `factor` and followed by `unit`. Default: a readable unit for
            timelines in seconds.
        critical_path: whether to mark the chain of actions that makes up the makespan.
    """
    times = Unit.of([timeline], unit, factor)
    said = summary(timeline, times)
    at = frame(timeline, top=0)
    width = PAD + at.left + at.width + at.right
    lines = _wrapped(said.split("  "), width - 2 * PAD)
    spans = [span for rank in lanes(timeline) for lane in rank for span in lane.row]
    mean = sum(span.end - span.start for span in spans) * at.scale / max(len(spans), 1)
    apart = sum(map(len, timeline.rows)) <= MOST and mean >= FINEST
    finest = max(FINEST, SHOWN * mean) if mean < FINEST else FINEST
    lines += [] if mean >= FINEST else _wrapped([AVERAGED], width - 2 * PAD)
    at = replace(at, top=PAD + 22 + 17 * len(lines) + 30)
    bottom = at.floor(len(timeline.rows) - 1)
    entries = _entries(timeline, num_chunks(timeline), critical_path=critical_path)
    legend, height = legend_lines(entries, width, bottom + 30)
    path = [cause.span for cause in find_path(timeline)] if critical_path else []
    body = [
        *_header(timeline, lines, width),
        *_axis(timeline, at, times, bottom),
        *drawn_lanes(timeline, at, times, 0 if apart else finest),
        *(path_marks(path, at, blocks=apart, finest=FINEST) if path else ()),
        *legend,
    ]
    size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
    name = escaped(f"Timeline of {heading(timeline)}: {said}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeflow" {size} role="img" aria-label="{name}">\n'
        f"<style>{style()}</style>\n"
        f'<rect class="ground" width="{_n(width)}" height="{_n(height)}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _header(timeline: Timeline, lines: list[str], width: float) -> Iterator[str]:
    yield text_at(PAD, PAD + 12, _cut(heading(timeline), width - 2 * PAD, 8.6), "title")
    for number, line in enumerate(lines):
        yield text_at(PAD, PAD + 32 + 17 * number, line, "said")


def _axis(timeline: Timeline, at: Frame, unit: Unit, bottom: float) -> Iterator[str]:
    """Times above the lanes, and a line through all lanes for each of them."""
    top = at.top - 8
    yield text_at(at.left + at.width + at.right, top - 4, "peak", "small end")
    end = f"{timeline.makespan * unit.factor:.4g} {unit.name}"
    step = round_step((9 + 6.5 * len(end)) / at.scale * unit.factor) if at.scale else 1.0
    lines = []
    for index in range(int(at.width / at.scale * unit.factor / step + 1e-9) + 1 if at.scale else 1):
        x = at.x(index * step / unit.factor)
        written = f"{index * step:.10g}" + f" {unit.name}" * (index == 0 and bool(unit.name))
        yield text_at(x, top - 4, written, "small middle")
        lines.append(f"M{_n(x)} {_n(top)}V{_n(bottom)}")
    yield f'<path class="grid" d="{"".join(lines)}"/>'


def drawn_lanes(timeline: Timeline, at: Frame, unit: Unit, finest: float) -> Iterator[str]:
    """The lanes of all ranks: with a block per span, or if `finest` is not 0, in columns of so many pixels."""
    drawn, most, chunks = lanes(timeline), peaks(timeline), num_chunks(timeline)
    merged = pieces(drawn, at.scale / finest) if finest else []
    for rank, of_rank in enumerate(drawn):
        for number, lane in enumerate(of_rank):
            yield from _ground(lane, at)
            if not finest:
                yield from _blocks(lane, chunks, at, unit)
            else:
                height = at.height(lane.stream)
                start = f"M{_n(at.left)} {_n(at.y(rank, lane.stream) + height / 2)}"
                yield from strips(merged[rank][number], chunks, start, height, finest)
        if at.heights.memory:
            yield from _memory(timeline, rank, at, most)


def _ground(lane: Lane, at: Frame) -> Iterator[str]:
    """An empty lane with its name."""
    y, height = at.y(lane.rank, lane.stream), at.height(lane.stream)
    look = "label end" if lane.stream is Stream.COMPUTE else "tiny end"
    if height >= 8:
        yield text_at(at.left - 10, y + height / 2 + (4 if lane.stream is Stream.COMPUTE else 3), lane.name, look)
    yield f'<rect class="lane" x="{_n(at.left)}" y="{_n(y)}" width="{_n(at.width)}" height="{height}"/>'


def _blocks(lane: Lane, chunks: int, at: Frame, unit: Unit) -> Iterator[str]:
    """One element per span, with a tooltip."""
    placed = blocks(lane.row, at)
    for block in placed:
        yield from _block(block, shade(block.span.action.kind, lane.chunk(block.span), chunks), at, unit)
    for one, other in pairwise(placed):
        if one.span.partner == other.span.action:
            y, height = at.y(lane.rank, lane.stream), at.height(lane.stream)
            size = f'x="{_n(one.first + 0.25)}" y="{_n(y - 0.75)}" height="{height + 1.5}"'
            yield f'<rect class="pair" {size} width="{_n(other.end - one.first - 1.5)}" rx="3"/>'


def _block(block: SpanBox, colour: str, at: Frame, unit: Unit) -> Iterator[str]:
    """A block, its number if it fits, and a thin gap before the next block, but not between the blocks of a pair."""
    span, room = block.span, block.end - block.first
    y, height = at.y(span.rank, span.stream), at.height(span.stream)
    width = room if block.joined or room < 3 else room - (1 if room > 5 else 0.5)
    rounded = ' rx="2"' if width > 6 else ""
    yield (
        f'<rect class="block" x="{_n(block.first)}" y="{_n(y)}" width="{_n(width)}" height="{height}"'
        f' fill="{colour}"{rounded}><title>{escaped(_said(span, unit))}</title></rect>'
    )
    number = span.action.part
    look = next((look for look, letter in NUMBERS if len(number) * letter <= width - 0.5), None)
    if look and height > 12:
        yield text_at(block.first + width / 2, y + height / 2 + 4, number, look)


def _memory(timeline: Timeline, rank: int, at: Frame, most: tuple[float, ...]) -> Iterator[str]:
    """The memory that a rank keeps, as a filled curve below its lane. All ranks have one scale."""
    floor = at.floor(rank)
    yield f'<path class="floor" d="M{_n(at.left)} {_n(floor)}h{_n(at.width)}"/>'
    yield text_at(at.left + at.width + at.right, floor, amount_text(timeline, most[rank]), "label end")
    curve = steps(timeline.memory(rank), at, FINEST)
    if not curve:
        return
    tall = (at.heights.memory - 2) / (max(most) or 1.0)
    path = "".join(f"H{_n(x)}V{_n(floor - memory * tall)}" for x, memory in curve)
    yield f'<path class="memory" d="M{_n(curve[0][0])} {_n(floor)}{path}"/>'
    x = next(x for x, memory in curve if memory >= most[rank] * (1 - 1e-9))
    radius = 2.5 if at.heights.memory > 10 else 1.75
    yield f'<circle class="peak" cx="{_n(x)}" cy="{_n(floor - most[rank] * tall)}" r="{radius}"/>'


Entry = tuple[list[str], str]  # swatches with the places {x} and {y}, and the words after them


def legend_lines(entries: Iterable[Entry], width: float, y: float) -> tuple[list[str], float]:
    """The legend in as many lines as it needs, and the height of the drawing."""
    x, drawn = float(PAD), []
    for swatches, words in entries:
        room = 18 * len(swatches) + 6 + 6.1 * len(words) + 18
        if x > PAD and x + room > width - PAD:
            x, y = PAD, y + 22
        drawn += [swatch.format(x=_n(x + 18 * number), y=_n(y - 10)) for number, swatch in enumerate(swatches)]
        drawn.append(text_at(x + 18 * len(swatches) + 4, y, words, "said"))
        x += room
    return drawn, y + PAD


def kind_entries(timelines: Sequence[Timeline], chunks: int) -> Iterator[Entry]:
    """An entry for each kind of action, and one for the shades of chunks."""
    low = SWATCH.replace("<rect ", '<rect transform="translate(0 6)" ').replace('height="12"', 'height="6"')
    for kind in kinds(timelines):
        swatch = SWATCH if DATAFLOW[kind].stream is Stream.COMPUTE else low
        yield [swatch.format(f'fill="{shade(kind, chunk, chunks)}"') for chunk in range(chunks)], DATAFLOW[kind].name
    if chunks > 1:
        yield [], "lighter: later chunk"


SWATCH = '<rect x="{{x}}" y="{{y}}" width="16" height="12" rx="2" {}/>'


def _entries(timeline: Timeline, chunks: int, *, critical_path: bool) -> Iterator[Entry]:
    yield from kind_entries([timeline], chunks)
    if any(span.partner for span in timeline):
        yield [SWATCH.format('class="pair"')], "overlapped pair"
    if critical_path:
        yield [SWATCH.format('class="critical"')], "critical path"
    yield [SWATCH.format('class="lane"')], "idle"
    hill = '<path class="memory" transform="translate({x} {y})" d="M0 12V8H5V3H11V8H16V12"/>'
    yield [hill], f"{unit_of(timeline)} kept for backwards"


def _said(span: Span, unit: Unit) -> str:
    overlapped = f", overlapped with {span.partner}" if span.partner else ""
    waits = f", of which {unit.text(span.exchange)} for tokens of experts" if span.exchange else ""
    return f"{span.action} on rank {span.rank}, {unit.text(span.start)} to {unit.text(span.end)}{waits}{overlapped}"


def _wrapped(parts: list[str], width: float) -> list[str]:
    """The parts in as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and 6.3 * len(f"{lines[-1]}   {part}") <= width:
            lines[-1] += f"\u2003{part}"
        else:
            lines.append(_cut(part, width, 6.3))
    return lines


def _cut(text: str, width: float, letter: float) -> str:
    most = int(width / letter)
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def text_at(x: float, y: float, text: str, look: str, more: str = "") -> str:
    """A text at a place, with the classes of its look."""
    return f'<text x="{_n(x)}" y="{_n(y)}" class="{look}"{more}>{escaped(text)}</text>'


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def style() -> str:
    """The style sheet. All rules apply to this drawing alone, since a page may hold several drawings."""
    return (
        ".pipeflow{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',Arial,sans-serif}"
        ".pipeflow text{font-size:12px}.pipeflow .title{font-size:15px;font-weight:600}"
        ".pipeflow .label{font-size:11px}.pipeflow .small{font-size:10.5px}.pipeflow .tiny{font-size:9px}"
        f".pipeflow .number{{font-size:11px;fill:{INK};text-anchor:middle}}.pipeflow .tight{{font-size:8.5px}}"
        ".pipeflow .middle{text-anchor:middle}.pipeflow .end{text-anchor:end}"
        ".pipeflow .blocks{fill:none;shape-rendering:crispEdges}"
        ".pipeflow .grid,.pipeflow .floor{fill:none;stroke-width:1}"
        ".pipeflow .memory{fill-opacity:.3;stroke-width:1}.pipeflow .pair{fill:none;stroke-width:1.5}"
        ".pipeflow .critical{fill:none;stroke-width:1.75;stroke-linejoin:round}"
        + _coloured(LIGHT)
        + f"@media (prefers-color-scheme:dark){{{_coloured(DARK)}}}"
        "@media screen{.pipeflow{max-width:100%;height:auto}}"
    )


def _coloured(scheme: Scheme) -> str:
    return (
        f".pipeflow .ground{{fill:{scheme.background}}}.pipeflow .lane{{fill:{scheme.lane}}}"
        f".pipeflow .title,.pipeflow .label{{fill:{scheme.text}}}"
        f".pipeflow .said,.pipeflow .small,.pipeflow .tiny{{fill:{scheme.muted}}}"
        f".pipeflow .grid,.pipeflow .floor{{stroke:{scheme.grid}}}.pipeflow .pair{{stroke:{scheme.text}}}"
        f".pipeflow .critical{{stroke:{scheme.accent}}}"
        f".pipeflow .memory{{fill:{scheme.memory};stroke:{scheme.memory}}}.pipeflow .peak{{fill:{scheme.memory}}}"
    )


LEAST, NARROWEST, WIDEST = 300.0, 560.0, 1400.0  # width of the lanes: least, least while spans stay narrow, largest
SHORTEST = 20, 44  # width of the shortest span: wanted, at most


@dataclass(frozen=True, slots=True)
class Frame:
    """The places of lanes. A rank has a lane for each of `streams`, then one for its memory, and then a gap.

    Attributes:
        left, top: where the lanes begin.
        width: the width of the lanes.
        right: the room to the right of the lanes, for the peak of each rank.
        scale: pixels per unit of time.
        heights: the heights of lanes.
        streams: the streams, computations first.
    """

    left: float
    top: float
    width: float
    right: float
    scale: float
    heights: Heights
    streams: tuple[Stream, ...]

    def x(self, time: float) -> float:
        """The horizontal place of a time."""
        return self.left + time * self.scale

    def y(self, rank: int, stream: Stream = Stream.COMPUTE) -> float:
        """The top of a rank's lane."""
        return self._top(rank) + self.heights.offset(self.streams.index(stream))

    def height(self, stream: Stream) -> int:
        """The height of the lanes of a stream."""
        return self.heights.lane if stream is Stream.COMPUTE else self.heights.beside

    def floor(self, rank: int) -> float:
        """The bottom of a rank's memory."""
        return self._top(rank) + self.heights.offset(len(self.streams)) - SPACE + self.heights.memory

    def _top(self, rank: int) -> float:
        pitch = self.heights.offset(len(self.streams)) - SPACE + self.heights.memory + self.heights.gap
        return self.top + rank * pitch


def frame(timeline: Timeline, top: float) -> Frame:
    """The frame for a timeline: as wide as its blocks need, within limits; the more ranks, the flatter."""
    drawn = lanes(timeline)
    horizon, unit = timeline.makespan if timeline.makespan >= SMALLEST else 0.0, shortest([timeline])
    wanted = min(max(horizon / unit * SHORTEST[0], NARROWEST), WIDEST)
    scale = fit([timeline], int(wanted))
    if scale * unit < 4 and horizon:  # whole pixels per span would leave too much of the width empty
        scale = wanted / horizon
    scale = min(scale, SHORTEST[1] / unit)
    if horizon:
        scale = max(scale, LEAST / horizon)
    return Frame(
        left=24 + max(6.5 * len(drawn[-1][0].name), *(5 * len(lane.name) for lane in drawn[-1])),
        top=top,
        width=horizon * scale or LEAST,
        right=22 + 6.5 * max(4, *(len(amount_text(timeline, peak)) for peak in peaks(timeline))),
        scale=scale,
        heights=heights(len(drawn)),
        streams=tuple(lane.stream for lane in drawn[0]),
    )


class SpanBox(NamedTuple):
    """A span, and its left and right edge."""

    span: Span
    first: float
    end: float

    @property
    def joined(self) -> bool:
        """Whether it is the first action of a pair, which is a forward."""
        return self.span.partner is not None and self.span.action.kind is Kind.F


def blocks(row: Row, at: Frame) -> list[SpanBox]:
    """The spans of a row that take time. Overlapping ones are cut."""
    found: list[SpanBox] = []
    for span in row:
        first = max(at.x(span.start), found[-1].end if found else at.left)
        end = at.x(span.end)
        if end - first > 1e-3:
            found.append(SpanBox(span, first, end))
    return found


def steps(curve: Curve, at: Frame, finest: float) -> list[tuple[float, float]]:
    """A memory curve as (x, amount from there on), with at most one step every `finest` pixels. A step has the highest
    amount of those that it stands for, so no peak is lost.
    """
    shown: list[tuple[float, float]] = []
    for time, memory in curve:
        x = at.x(time)
        if shown and x - shown[-1][0] < finest:
            shown[-1] = shown[-1][0], max(shown[-1][1], memory)
        elif not shown or shown[-1][1] != memory:
            shown.append((x, memory))
    if shown and curve[-1][1] != shown[-1][1]:
        shown.append((max(at.x(curve[-1][0]), shown[-1][0]), curve[-1][1]))
    return shown


def path_marks(path: Sequence[Span], at: Frame, *, blocks: bool, finest: float) -> Iterator[str]:
    """The marks of the critical path. With `blocks`: a frame around each of its blocks, and a line wherever it changes
    rank. Otherwise: one line along the middle of the lanes, with corners at least `finest` pixels apart.
    """
    if blocks:
        for span in path:
            if (width := at.x(span.end) - at.x(span.start)) > 0:
                y, height = at.y(span.rank, span.stream), at.height(span.stream)
                place = f'x="{at.x(span.start) + 0.25:.2f}" y="{y - 0.75:.2f}" height="{height + 1.5}"'
                yield f'<rect class="critical" {place} width="{max(width - 1.5, 0.5):.2f}" rx="3"/>'
        for before, span in pairwise(path):
            if before.rank != span.rank:
                yield f'<path class="critical" d="{_link(before, span, at)}"/>'
    else:
        yield f'<path class="critical" d="{_path_line(path, at, finest)}"/>'


def _link(before: Span, span: Span, at: Frame) -> str:
    """A line from the edge of one block to the edge of the next one, on another rank."""
    down = span.rank > before.rank
    y = at.y(before.rank, before.stream) + (at.height(before.stream) if down else 0)
    tip = at.y(span.rank, span.stream) + (0 if down else at.height(span.stream))
    return f"M{at.x(before.end):.2f} {y:g}L{at.x(span.start):.2f} {tip:g}"


def _path_line(path: Sequence[Span], at: Frame, finest: float) -> str:
    """A line through the middle of the lanes, with at most one corner every `finest` pixels."""
    corners: list[tuple[float, float]] = []
    for span in path:
        y = at.y(span.rank, span.stream) + at.height(span.stream) / 2
        for x in (at.x(span.start), at.x(span.end)):
            if not corners or x - corners[-1][0] >= finest:
                corners.append((x, y))
    return "M" + "L".join(f"{x:.1f} {y:g}" for x, y in corners)


STEPS = 32  # steps of each colour component, so that columns that look alike share a path


def strips(line: Line, chunks: int, start: str, height: float, finest: float) -> Iterator[str]:
    """One path per colour, from the point that `start` moves to, with columns `finest` pixels wide. Idle time is
    transparent, so that a strip looks right on a light and on a dark ground.
    """
    columns: defaultdict[tuple[str, float], list[tuple[int, int]]] = defaultdict(list)
    for piece in line:
        if isinstance(piece, Mixture):
            columns[_mixed(piece, chunks)].append((piece.first, piece.end))
        else:
            columns[shade(piece.kind, piece.chunk, chunks), 1.0].append((piece.first, piece.end))
    for (colour, opacity), ends in sorted(columns.items()):
        covers = "" if opacity == 1 else f' stroke-opacity="{opacity:.3g}"'
        look = f'class="blocks" stroke-width="{height}" stroke="{colour}"{covers}'
        yield f'<path {look} d="{start}{_dashes(ends, finest)}"/>'


def _mixed(mixture: Mixture, chunks: int) -> tuple[str, float]:
    """The colour of a column as CSS writes it, and its opacity."""
    (red, green, blue), busy = average(mixture.shares, chunks)
    red, green, blue = (round(part / 255 * STEPS) * 255 / STEPS for part in (red, green, blue))
    return css((red, green, blue)), round(busy * STEPS) / STEPS


def _dashes(columns: Iterable[tuple[int, int]], finest: float) -> str:
    """Columns as a line with gaps. Adjacent columns are one dash."""
    dashes: list[list[int]] = []
    for first, end in columns:
        if dashes and dashes[-1][1] == first:
            dashes[-1][1] = end
        else:
            dashes.append([first, end])
    ends = [0, *(end for _, end in dashes)]
    return "".join(
        f"m{(first - before) * finest:g} 0h{(end - first) * finest:g}"
        for before, (first, end) in zip(ends, dashes, strict=False)
    )
