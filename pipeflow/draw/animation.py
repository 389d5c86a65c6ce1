"""The animated picture: several timelines below each other on one time scale, in which time runs. Must not contain: how
a block is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeflow.core.analysis.idle_time import hand_overs
from pipeflow.core.analysis.measures import busy_times
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit, amount_text, escaped, heading, peaks, unit_of
from pipeflow.draw.colours import DARK, LIGHT, Scheme, css, hue
from pipeflow.draw.lane_times import Heights, fit, lanes, num_chunks, several
from pipeflow.draw.svg_timeline import MOST, PAD, SWATCH, Frame, drawn_lanes, kind_entries, legend_lines, style, text_at

WIDTH, LEFT, RIGHT = 800, 64, 104  # pixels: of the picture, of the names of ranks, of the shares
LONGEST = 30  # letters of a name
HEIGHTS = Heights(lane=16, beside=6, memory=0, gap=3)
HEADER, BELOW = 24, 12  # pixels above the lanes of a timeline, and below them
LEAD, PLAY, HOLD = 0.8, 11.0, 4.2  # seconds: before time runs, while it runs, and after that
TURN = LEAD + PLAY + HOLD
FLIGHT = 0.22  # seconds in which a tensor passes to the next rank


def animated_svg(timelines: Timeline | Sequence[Timeline], *, unit: str = "", factor: float = 1.0) -> str:
    """Timelines as the text of one SVG document in which time runs: below each other, on one time scale, with the idle
    time of each. It needs no script, so it moves on a web page too. It stands still for readers who asked for that.

    Args:
        timelines: one or more timelines, whose times have one unit.
        unit, factor: times are written multiplied by `factor` and followed by `unit`, as in `svg`.

    Raises UsageError for timelines with different units, and for more actions than such a picture can show.
    """
    drawn = several(timelines)
    if len({timeline.unit for timeline in drawn}) > 1:
        raise UsageError("these timelines have different units of time, so no scale fits all: draw them apart")
    times = Unit.of(drawn, unit, factor)
    if (number := sum(len(row) for timeline in drawn for row in timeline.rows)) > MOST:
        raise UsageError(f"an animated picture shows up to {MOST} actions, not {number}: choose fewer microbatches")
    longest = max(timeline.makespan for timeline in drawn) or 1.0
    room = WIDTH - 2 * PAD - LEFT - RIGHT
    scale = fit(drawn, room)
    top, body = PAD + 8.0, list[str]()
    for timeline in drawn:
        at = _frame(timeline, top + HEADER, scale)
        body += _panel(timeline, at, times, longest)
        top = at.floor(len(timeline.rows) - 1) + BELOW
    chunks = max(map(num_chunks, drawn))
    legend, height = legend_lines(_entries(drawn, chunks), WIDTH, top + PAD)
    said = "; ".join(f"{timeline.name}: {_idle(timeline)} idle" for timeline in drawn)
    name = escaped(f"One step of {', '.join(heading(timeline) for timeline in drawn)}. {said}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeflow" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
        f' height="{height:g}" role="img" aria-label="{name}">\n'
        f"<style>{style()}{_motion(longest * scale)}</style>\n"
        f'<rect class="ground" width="{WIDTH}" height="{height:g}"/>\n' + "\n".join([*body, *legend]) + "\n</svg>\n"
    )


def _frame(timeline: Timeline, top: float, scale: float) -> Frame:
    """The places of a timeline's lanes, for a picture in which all timelines have one scale."""
    streams = tuple(lane.stream for lane in lanes(timeline)[0])
    return Frame(PAD + LEFT, top, timeline.makespan * scale, RIGHT, scale, HEIGHTS, streams)


def _panel(timeline: Timeline, at: Frame, unit: Unit, longest: float) -> Iterator[str]:
    """A timeline with its name and its shares, and all that moves over it."""
    floor = at.floor(len(timeline.rows) - 1)
    middle, tall = (at.top + floor) / 2, floor - at.top
    name = timeline.name if len(timeline.name) <= LONGEST else timeline.name[:LONGEST] + "\u2026"
    yield text_at(PAD, at.top - 8, name, "title")
    sizes = heading(timeline).removeprefix(timeline.name + ", ")
    x = max(at.left, PAD + 9.0 * len(name) + 10)
    yield text_at(x, at.top - 8, f"{sizes}: a step takes {unit.text(timeline.makespan)}", "said")
    yield from drawn_lanes(timeline, at, unit, 0)
    yield from _idle_times(timeline, at)
    end = WIDTH - PAD
    yield text_at(end, middle, f"{_idle(timeline)} idle", "share end")
    what = "" if timeline.saved_bytes else f" {unit_of(timeline)}"
    kept = f"keeps {amount_text(timeline, max(peaks(timeline)))}{what}"
    yield text_at(end, middle + 17, kept, "small end" if len(kept) < 20 else "tiny end")
    saved = 1 - timeline.makespan / longest
    if saved >= 0.005 and (longest - timeline.makespan) * at.scale > 96:
        yield text_at(at.left + at.width + 12, middle + 4, f"{100 * saved:.0f} % less time", "label")
    whole = f'x="{at.left:g}" y="{at.top - 1:g}" height="{tall + 2:g}"'
    yield f'<rect class="veil" {whole} width="{longest * at.scale:g}"/>'
    yield from _tokens(timeline, at, longest)
    yield f'<rect class="now" {whole} width="2"/>'


def _idle(timeline: Timeline) -> str:
    """The share of the step in which ranks are idle, on average."""
    busy, whole = busy_times(timeline), timeline.makespan * len(timeline.rows)
    return f"{100 * (1 - sum(busy) / whole if whole else 0.0):.0f} %"


def _idle_times(timeline: Timeline, at: Frame) -> Iterator[str]:
    """What glows: a block for each time in which a rank computes nothing."""
    yield '<g class="glow">'
    for rank, row in enumerate(timeline.on(Stream.COMPUTE)):
        ends = [0.0, *(span.end for span in row)]
        for start, end in zip(ends, (*(span.start for span in row), timeline.makespan), strict=True):
            if (end - start) * at.scale > 1:
                size = f'width="{(end - start) * at.scale - 1:g}" height="{at.height(Stream.COMPUTE)}"'
                yield f'<rect x="{at.x(start):g}" y="{at.y(rank):g}" {size} rx="2"/>'
    yield "</g>"


def _tokens(timeline: Timeline, at: Frame, longest: float) -> Iterator[str]:
    """A token for each value that passes from rank to rank, which moves when its maker has ended."""
    for maker, span in hand_overs(timeline):
        x, y = at.x(maker.end), at.y(maker.rank) + at.height(Stream.COMPUTE) / 2
        start = LEAD + PLAY * maker.end / longest - FLIGHT / 2 - TURN
        look = f"animation-delay:{start:.2f}s;--y:{at.y(span.rank) - at.y(maker.rank):g}px"
        fill = css(hue(maker.action.kind).rgb)
        number = text_at(x, y + 3.2, maker.action.part, "number tight")
        yield f'<g class="token" style="{look}"><circle cx="{x:g}" cy="{y:g}" r="7" fill="{fill}"/>{number}</g>'


def _entries(timelines: Sequence[Timeline], chunks: int) -> Iterator[tuple[list[str], str]]:
    yield from kind_entries(timelines, chunks)
    glow = SWATCH.format('class="lane"') + SWATCH.format('class="glow"')
    yield [glow], "idle"


def _motion(room: float) -> str:
    """The style sheet of what moves. Where nothing moves, or for readers who asked for less motion, all is shown."""
    start, end = 100 * LEAD / TURN, 100 * (LEAD + PLAY) / TURN
    flight, across = 100 * FLIGHT / TURN, room * FLIGHT / PLAY
    names = ("veil", "now", "token")
    moving = "".join(f".pipeflow .{name}{{animation:pipeflow-{name} {TURN}s linear infinite}}" for name in names)
    moving += ".pipeflow .glow{animation:pipeflow-glow 1.6s ease-in-out infinite alternate}"
    there, here = f"translateX({room:g}px)", f"translate({-across / 2:.2f}px,0)"
    return (
        ".pipeflow .share{font-size:17px;font-weight:600}.pipeflow .token circle{stroke-width:1.5}"
        ".pipeflow .veil{opacity:0;transform-box:fill-box;transform-origin:100% 0}"
        ".pipeflow .now,.pipeflow .token{opacity:0}"
        f"{_coloured(LIGHT)}@media (prefers-color-scheme:dark){{{_coloured(DARK)}}}"
        f"@media (prefers-reduced-motion:no-preference){{{moving}}}"
        f"@keyframes pipeflow-veil{{0%{{opacity:0}}{start / 2:.2f}%,{start:.2f}%{{opacity:.8;transform:none}}"
        f"{end:.2f}%,100%{{opacity:.8;transform:scaleX(0)}}}}"
        f"@keyframes pipeflow-now{{0%{{opacity:0}}{start:.2f}%{{opacity:1;transform:none}}"
        f"{end:.2f}%{{opacity:1;transform:{there}}}{end + 1:.2f}%,100%{{opacity:0;transform:{there}}}}}"
        f"@keyframes pipeflow-token{{0%{{opacity:1;transform:{here}}}"
        f"{flight:.2f}%{{opacity:1;transform:translate({across / 2:.2f}px,var(--y))}}"
        f"{flight + 0.01:.2f}%,100%{{opacity:0}}}}"
        "@keyframes pipeflow-glow{from{opacity:.35}to{opacity:.8}}"
    )


def _coloured(scheme: Scheme) -> str:
    return (
        f".pipeflow .glow,.pipeflow .share{{fill:{scheme.accent}}}"
        f".pipeflow .glow{{opacity:.6;filter:drop-shadow(0 0 2px {scheme.accent})}}"
        f".pipeflow .veil{{fill:{scheme.background}}}.pipeflow .now{{fill:{scheme.text}}}"
        f".pipeflow .token circle{{stroke:{scheme.text}}}"
    )
