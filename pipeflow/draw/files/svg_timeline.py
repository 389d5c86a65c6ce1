"""svg: a timeline as a standalone SVG. Must not contain: the horizontal places of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from pipeflow.core.analysis.idle_time import critical_path as find_path
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.span import Span
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit, amount_text, escaped, heading, peaks, round_step, summary, unit_of
from pipeflow.draw.colours import DARK, INK, LIGHT, Scheme, shade
from pipeflow.draw.files.lane_frame import Frame, SpanBox, blocks, frame, path_marks, steps, strips
from pipeflow.draw.lane_times import Lane, kinds, lanes, num_chunks, pieces

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
    apart = _apart(timeline, at)
    lines += [] if _width(timeline, at) >= FINEST else _wrapped([AVERAGED], width - 2 * PAD)
    at = replace(at, top=PAD + 22 + 17 * len(lines) + 30)
    bottom = at.floor(len(timeline.rows) - 1)
    legend, height = _legend(timeline, width, bottom + 30, critical_path=critical_path)
    path = [cause.span for cause in find_path(timeline)] if critical_path else []
    body = [
        *_header(timeline, lines, width),
        *_axis(timeline, at, times, bottom),
        *_lanes(timeline, at, times, apart=apart),
        *(path_marks(path, at, blocks=apart, finest=FINEST) if path else ()),
        *legend,
    ]
    size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
    name = escaped(f"Timeline of {heading(timeline)}: {said}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeflow" {size} role="img" aria-label="{name}">\n'
        f"<style>{_style()}</style>\n"
        f'<rect class="ground" width="{_n(width)}" height="{_n(height)}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _header(timeline: Timeline, lines: list[str], width: float) -> Iterator[str]:
    yield _text(PAD, PAD + 12, _cut(heading(timeline), width - 2 * PAD, 8.6), "title")
    for number, line in enumerate(lines):
        yield _text(PAD, PAD + 32 + 17 * number, line, "said")


def _axis(timeline: Timeline, at: Frame, unit: Unit, bottom: float) -> Iterator[str]:
    """Times above the lanes, and a line through all lanes for each of them."""
    top = at.top - 8
    yield _text(at.left + at.width + at.right, top - 4, "peak", "small end")
    end = f"{timeline.makespan * unit.factor:.4g} {unit.name}"
    step = round_step((9 + 6.5 * len(end)) / at.scale * unit.factor) if at.scale else 1.0
    lines = []
    for index in range(int(at.width / at.scale * unit.factor / step + 1e-9) + 1 if at.scale else 1):
        x = at.x(index * step / unit.factor)
        written = f"{index * step:.10g}" + f" {unit.name}" * (index == 0 and bool(unit.name))
        yield _text(x, top - 4, written, "small middle")
        lines.append(f"M{_n(x)} {_n(top)}V{_n(bottom)}")
    yield f'<path class="grid" d="{"".join(lines)}"/>'


def _apart(timeline: Timeline, at: Frame) -> bool:
    """Whether every span is a block of its own: if they are few, and wide enough."""
    return sum(map(len, timeline.rows)) <= MOST and _width(timeline, at) >= FINEST


def _width(timeline: Timeline, at: Frame) -> float:
    """The mean width of a span in a lane, in pixels."""
    spans = [span for rank in lanes(timeline) for lane in rank for span in lane.row]
    return sum(span.end - span.start for span in spans) * at.scale / max(len(spans), 1)


def _lanes(timeline: Timeline, at: Frame, unit: Unit, *, apart: bool) -> Iterator[str]:
    drawn, most, chunks = lanes(timeline), peaks(timeline), num_chunks(timeline)
    width = _width(timeline, at)
    finest = max(FINEST, SHOWN * width) if width < FINEST else FINEST
    merged = [] if apart else pieces(drawn, at.scale / finest)
    for rank, of_rank in enumerate(drawn):
        for number, lane in enumerate(of_rank):
            yield from _ground(lane, at)
            if apart:
                yield from _blocks(lane, chunks, at, unit)
            else:
                height = at.height(lane.stream)
                start = f"M{_n(at.left)} {_n(at.y(rank, lane.stream) + height / 2)}"
                yield from strips(merged[rank][number], chunks, start, height, finest)
        yield from _memory(timeline, rank, at, most)


def _ground(lane: Lane, at: Frame) -> Iterator[str]:
    """An empty lane with its name."""
    y, height = at.y(lane.rank, lane.stream), at.height(lane.stream)
    look = "label end" if lane.stream is Stream.COMPUTE else "tiny end"
    if height >= 8:
        yield _text(at.left - 10, y + height / 2 + (4 if lane.stream is Stream.COMPUTE else 3), lane.name, look)
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
    number = str(span.action.microbatch)
    look = next((look for look, letter in NUMBERS if len(number) * letter <= width - 0.5), None)
    if look and height > 12:
        yield _text(block.first + width / 2, y + height / 2 + 4, number, look)


def _memory(timeline: Timeline, rank: int, at: Frame, most: tuple[float, ...]) -> Iterator[str]:
    """The memory that a rank keeps, as a filled curve below its lane. All ranks have one scale."""
    floor = at.floor(rank)
    yield f'<path class="floor" d="M{_n(at.left)} {_n(floor)}h{_n(at.width)}"/>'
    yield _text(at.left + at.width + at.right, floor, amount_text(timeline, most[rank]), "label end")
    curve = steps(timeline.memory(rank), at, FINEST)
    if not curve:
        return
    tall = (at.heights.memory - 2) / (max(most) or 1.0)
    path = "".join(f"H{_n(x)}V{_n(floor - memory * tall)}" for x, memory in curve)
    yield f'<path class="memory" d="M{_n(curve[0][0])} {_n(floor)}{path}"/>'
    x = next(x for x, memory in curve if memory >= most[rank] * (1 - 1e-9))
    radius = 2.5 if at.heights.memory > 10 else 1.75
    yield f'<circle class="peak" cx="{_n(x)}" cy="{_n(floor - most[rank] * tall)}" r="{radius}"/>'


def _legend(timeline: Timeline, width: float, y: float, *, critical_path: bool) -> tuple[list[str], float]:
    """The legend in as many lines as it needs, and the height of the drawing."""
    chunks = num_chunks(timeline)
    x, drawn = float(PAD), []
    for swatches, words in _entries(timeline, chunks, critical_path=critical_path):
        room = 18 * len(swatches) + 6 + 6.1 * len(words) + 18
        if x > PAD and x + room > width - PAD:
            x, y = PAD, y + 22
        drawn += [swatch.format(x=_n(x + 18 * number), y=_n(y - 10)) for number, swatch in enumerate(swatches)]
        drawn.append(_text(x + 18 * len(swatches) + 4, y, words, "said"))
        x += room
    return drawn, y + PAD


def _entries(timeline: Timeline, chunks: int, *, critical_path: bool) -> Iterator[tuple[list[str], str]]:
    plain = '<rect x="{{x}}" y="{{y}}" width="16" height="12" rx="2" {}/>'
    low = '<rect x="{{x}}" y="{{y}}" transform="translate(0 6)" width="16" height="6" {}/>'
    for kind in kinds([timeline]):
        swatch = plain if DATAFLOW[kind].stream is Stream.COMPUTE else low
        colours = [shade(kind, chunk, chunks) for chunk in range(chunks)]
        yield [swatch.format(f'fill="{colour}"') for colour in colours], DATAFLOW[kind].name
    if chunks > 1:
        yield [], "lighter: later chunk"
    if any(span.partner for span in timeline):
        yield [plain.format('class="pair"')], "overlapped pair"
    if critical_path:
        yield [plain.format('class="critical"')], "critical path"
    yield [plain.format('class="lane"')], "idle"
    hill = '<path class="memory" transform="translate({x} {y})" d="M0 12V8H5V3H11V8H16V12"/>'
    yield [hill], f"{unit_of(timeline)} kept for backwards"


def _said(span: Span, unit: Unit) -> str:
    overlapped = f", overlapped with {span.partner}" if span.partner else ""
    return f"{span.action} on rank {span.rank}, {unit.text(span.start)} to {unit.text(span.end)}{overlapped}"


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


def _text(x: float, y: float, text: str, look: str, more: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" class="{look}"{more}>{escaped(text)}</text>'


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _style() -> str:
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
