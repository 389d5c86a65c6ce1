from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import critical_path
from pipeflow.core.dataflow import COPIES, DATAFLOW, Stream
from pipeflow.core.timeline import Timeline
from pipeflow.draw import svg
from pipeflow.draw.colours import DARK, HUES, INK, LIGHT, SPARE, Scheme, mixed
from pipeflow.draw.lane_times import lanes as drawn_lanes
from tests.draw.samples import (
    SAMPLES,
    empty,
    exchanging,
    measured,
    paired,
    planned,
    reducing,
    with_a_moment,
    with_bytes,
    with_transfers,
)

Element = ElementTree.Element
NAMESPACE = "{http://www.w3.org/2000/svg}"


@cache
def drawn(timeline: Timeline, *, unit: str = "", factor: float = 1.0) -> Element:
    return ElementTree.fromstring(svg(timeline, unit=unit, factor=factor))


def looking(root: Element, look: str, tag: str = "rect") -> list[Element]:
    return [element for element in root.iter(NAMESPACE + tag) if look in element.get("class", "").split()]


def number(element: Element, name: str) -> float:
    return float(element.get(name, "0"))


def actions(root: Element) -> list[str]:
    return [title.text.split()[0] for title in root.iter(NAMESPACE + "title") if title.text]


def texts(root: Element) -> list[str]:
    return [text.text or "" for text in root.iter(NAMESPACE + "text")]


APART = [name for name in SAMPLES if name not in ("dense", "timeless", "moment")]


@pytest.mark.parametrize("name", APART)
def test_every_action_is_drawn_once(name: str) -> None:
    spans = SAMPLES[name]
    assert Counter(actions(drawn(SAMPLES[name]))) == Counter(
        str(span.action) for span in spans if span.end > span.start
    )


def test_what_runs_beside_computations_has_a_lower_lane_for_each_stream() -> None:
    timeline = reducing()
    root = drawn(timeline)
    lanes = looking(root, "lane")[: 2 * len(timeline.rows)]
    scale = number(lanes[0], "width") / timeline.makespan
    for computed, beside, row in zip(lanes[::2], lanes[1::2], timeline.on(Stream.REDUCE), strict=True):
        assert number(computed, "y") + number(computed, "height") < number(beside, "y")
        assert number(beside, "height") < number(computed, "height") / 2
        bars = [bar for bar in looking(root, "block") if bar.get("y") == beside.get("y")]
        assert [number(bar, "width") for bar in bars] == pytest.approx(
            [(span.end - span.start) * scale for span in row], abs=1.02
        )
        assert {bar.get("height") for bar in bars} == {beside.get("height")}
    assert texts(root).count("reductions") == len(timeline.rows)
    assert "gradient reduction" in texts(root)
    assert "gradient reduction" not in texts(drawn(reducing(reduce=0)))


@pytest.mark.parametrize("name", APART)
def test_blocks_of_a_lane_do_not_overlap_and_lie_in_it(name: str) -> None:
    root = drawn(SAMPLES[name])
    lanes = [lane for lane in looking(root, "lane") if number(lane, "width") > 16]  # the legend has one, too
    assert len(lanes) == sum(map(len, drawn_lanes(SAMPLES[name])))
    for lane in lanes:
        blocks = [block for block in looking(root, "block") if block.get("y") == lane.get("y")]
        edges = [(number(block, "x"), number(block, "x") + number(block, "width")) for block in blocks]
        assert all(end <= start + 0.02 for (_, end), (start, _) in pairwise(edges))
        assert all(
            start >= number(lane, "x") and end <= number(lane, "x") + number(lane, "width") + 0.02
            for start, end in edges
        )


@pytest.mark.parametrize("timeline", SAMPLES.values(), ids=SAMPLES)
def test_all_that_is_drawn_lies_in_the_picture(timeline: Timeline) -> None:
    root = drawn(timeline)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for rect in root.iter(NAMESPACE + "rect"):
        assert number(rect, "x") >= 0
        assert number(rect, "y") >= 0
        assert number(rect, "x") + number(rect, "width") <= width + 0.02
        assert number(rect, "y") + number(rect, "height") <= height + 0.02
    for text in root.iter(NAMESPACE + "text"):
        assert 0 <= number(text, "x") <= width
        assert 0 <= number(text, "y") <= height


@pytest.mark.parametrize("timeline", SAMPLES.values(), ids=SAMPLES)
def test_texts_do_not_overlap(timeline: Timeline) -> None:
    """By the widths that letters of common fonts have."""
    boxes = []
    for text in drawn(timeline, unit="ms").iter(NAMESPACE + "text"):
        looks = text.get("class", "").split()
        width = len(text.text or "") * (8.0 if "title" in looks else 4.8 if "tight" in looks else 6.0)
        x = number(text, "x") - (width if "end" in looks else width / 2 if {"middle", "number"} & set(looks) else 0)
        boxes.append((round(number(text, "y")), x, x + width, text.text))
    for (y, _, end, _), (below, start, _, _) in pairwise(sorted(boxes, key=lambda box: box[:3])):
        assert y != below or end <= start + 0.5


def test_positions_are_times() -> None:
    root = drawn(planned())
    starts = {title: number(block, "x") for title, block in zip(actions(root), looking(root, "block"), strict=True)}
    unit = starts["0F1"] - starts["0F0"]
    for span in planned():
        assert starts[str(span.action)] - starts["0F0"] == pytest.approx(span.start * unit, abs=0.01)


@pytest.mark.parametrize("timeline", [planned(), planned("gpipe", 1, 1), planned("zb-h1", 4, 300)])
def test_lanes_are_as_long_as_the_makespan(timeline: Timeline) -> None:
    root = drawn(timeline)
    ticks = [text for text in looking(root, "middle", "text") if "small" in text.get("class", "")]
    first, second = ticks[:2]
    unit = (number(second, "x") - number(first, "x")) / (float(second.text or "") - float(first.text or ""))
    lane = looking(root, "lane")[0]
    assert number(lane, "x") == number(first, "x")
    assert number(lane, "width") == pytest.approx(timeline.makespan * unit, rel=1e-3)


def test_numbers_stand_where_there_is_room() -> None:
    root = drawn(planned())
    assert Counter(text.text for text in looking(root, "number", "text")) == Counter(
        str(span.action.microbatch) for span in planned()
    )


def test_a_block_says_what_it_is() -> None:
    titles = [title.text for title in drawn(measured(), unit="ms", factor=1000).iter(NAMESPACE + "title")]
    span = measured().rows[2][1]
    assert f"2F1 on rank 2, {span.start * 1000:.4g} ms to {span.end * 1000:.4g} ms" in titles


def test_a_block_says_how_long_it_waits_for_experts() -> None:
    titles = [title.text for title in drawn(exchanging()).iter(NAMESPACE + "title")]
    assert "0F0 on rank 0, 0 to 1, of which 0.25 for tokens of experts" in titles


def test_a_pair_has_a_frame_around_both() -> None:
    root = drawn(paired())
    frames = [frame for frame in looking(root, "pair") if number(frame, "rx") == 3]
    assert len(frames) == 3
    blocks = dict(zip(actions(root), looking(root, "block"), strict=True))
    inside = [{action for action, block in blocks.items() if frame_holds(frame, block)} - {"1W0"} for frame in frames]
    assert inside == [{"0F2", "0B0"}, {"0F3", "0B1"}, {"1F1", "1I0"}]
    touching = {
        action
        for (action, block), (_, other) in pairwise(blocks.items())
        if abs(number(block, "x") + number(block, "width") - number(other, "x")) < 0.1
    }
    assert touching == {"0F2", "0F3", "1F1"}
    assert "overlapped pair" in texts(root)
    assert "overlapped pair" not in texts(drawn(planned()))


def frame_holds(frame: Element, block: Element) -> bool:
    middle = number(block, "x") + number(block, "width") / 2
    same_lane = abs(number(frame, "y") - number(block, "y")) < 2
    return same_lane and number(frame, "x") < middle < number(frame, "x") + number(frame, "width")


def test_memory_is_a_curve_with_its_peak() -> None:
    root = drawn(planned())
    hills = [path for path in looking(root, "memory", "path") if path.get("transform") is None]
    assert len(hills) == 4
    tops = [min(map(float, re.findall(r"V([\d.]+)", hill.get("d", "")))) for hill in hills]
    dots = [number(dot, "cy") for dot in looking(root, "peak", "circle")]
    assert dots == pytest.approx(tops, abs=0.02)
    floors = [float(hill.get("d", "").split("H")[0].split()[1]) for hill in hills]
    heights = [floor - top for floor, top in zip(floors, tops, strict=True)]
    assert [height / heights[-1] for height in heights] == pytest.approx([4, 3, 2, 1], abs=0.02)


def test_bytes_are_written_for_people() -> None:
    assert {"12 GiB", "bytes kept for backwards"} <= set(texts(drawn(with_bytes())))


def test_measures_are_in_the_unit_of_the_caller() -> None:
    written = " ".join(texts(drawn(measured(), unit="ms", factor=1000)))
    assert f"makespan {measured().makespan * 1000:.4g} ms" in written
    assert "0 ms" in written


def test_nothing_of_a_timeline_without_time_is_a_block() -> None:
    assert actions(drawn(empty())) == []
    assert actions(drawn(SAMPLES["timeless"])) == []
    assert "0F0" not in actions(drawn(with_a_moment()))


def test_names_cannot_leave_their_text() -> None:
    root = drawn(replace(planned("1f1b", 2, 3), name='<b> & "x" ]]> \x1b\udc80'), unit="<s>")
    assert texts(root)[0] == '<b> & "x" ]]> \ufffd\ufffd, 2 ranks, 3 microbatches'
    assert "0 <s>" in texts(root)
    assert {element.tag.removeprefix(NAMESPACE) for element in root.iter()} <= {
        *("svg", "style", "rect", "text", "title", "path", "circle")
    }


@pytest.mark.parametrize(("name", "microbatches"), [("1f1b", 400), ("gpipe", 700), ("zb-h1", 1000)])
def test_what_is_too_dense_is_drawn_in_average_colours(name: str, microbatches: int) -> None:
    """Both ranks of a steady state do the same in every column, so no column differs much from the others: no moire."""
    timeline = planned(name, 2, microbatches)
    root = drawn(timeline)
    assert actions(root) == []
    strips = [
        (
            [int(path.get("stroke", "")[at : at + 2], 16) for at in (1, 3, 5)],
            number(path, "stroke-opacity") or 1.0,
            sum(map(float, re.findall(r"h([\d.]+)", path.get("d", "")))),
        )
        for path in looking(root, "blocks", "path")
    ]
    lane = number(looking(root, "lane")[0], "width")
    covered = sum(opacity * length for _, opacity, length in strips)
    assert covered == pytest.approx(2 * lane * timeline.work / timeline.makespan, rel=0.02)  # ranks work equally long
    spans = [span for span in timeline if span.end > span.start]
    for part in range(3):
        drawn_part = sum(colour[part] * opacity * length for colour, opacity, length in strips) / covered
        times = sum(span.end - span.start for span in spans)
        wanted = sum((span.end - span.start) * HUES[span.action.kind].rgb[part] for span in spans) / times
        assert drawn_part == pytest.approx(wanted, abs=6)


def test_averages_are_said_and_only_where_there_are_any() -> None:
    assert any("average colour" in text for text in texts(drawn(planned("1f1b", 2, 400))))
    for each in (planned(), planned("gpipe", 64, 64)):  # the second one has more blocks than can be elements
        assert not any("average colour" in text for text in texts(drawn(each)))


@pytest.mark.parametrize("timeline", [planned("1f1b", 3, 4), with_transfers(), reducing(), measured()])
def test_the_critical_path_is_marked_where_it_was_asked_for(timeline: Timeline) -> None:
    root = ElementTree.fromstring(svg(timeline, critical_path=True))
    path = [cause.span for cause in critical_path(timeline) if cause.span.end > cause.span.start]
    frames = looking(root, "critical")
    at_blocks = {(round(number(block, "x") + 0.25, 1), number(block, "y") - 0.75) for block in looking(root, "block")}
    *marked, _legend = [(round(number(frame, "x"), 1), number(frame, "y")) for frame in frames]
    assert len(marked) == len(set(marked)) == len(path)
    assert set(marked) <= at_blocks
    crossings = sum(before.rank != after.rank for before, after in pairwise(path))
    assert len(looking(root, "critical", "path")) >= crossings
    assert "critical path" in texts(root)
    assert not looking(drawn(timeline), "critical")
    assert "critical path" not in texts(drawn(timeline))


def test_the_critical_path_of_a_dense_picture_is_one_line() -> None:
    text = svg(planned("1f1b", 4, 2000), critical_path=True)
    (line,) = looking(ElementTree.fromstring(text), "critical", "path")
    corners = [float(x) for x in re.findall(r"[ML]([\d.]+)", line.get("d", ""))]
    assert corners == sorted(corners)
    assert 300 < len(corners) < 800


def test_the_size_is_bounded() -> None:
    assert len(svg(planned("zb-h1", 2, 1200))) < 1.1 * len(svg(planned("zb-h1", 2, 900))) < 2 * 16_000


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def test_numbers_are_legible_on_every_block() -> None:
    """WCAG 2.1, success criterion 1.4.3: a contrast of at least 4.5 to 1."""
    computed = [hue for kind, hue in HUES.items() if DATAFLOW[kind].stream is Stream.COMPUTE]
    assert all(contrast(INK, mixed(hue, chunk, 4)) >= 4.5 for hue in (*computed, *SPARE) for chunk in range(4))


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_what_runs_beside_computations_stands_out_from_the_ground(scheme: Scheme) -> None:
    others = HUES[Kind.O], HUES[Kind.L], *SPARE
    for hue, least in ((HUES[Kind.R], 1.7), *((other, 1.3) for other in others)):
        assert all(contrast(scheme.lane, mixed(hue, chunk, 2)) >= least for chunk in range(2))


SIGHTS = {  # what is seen of linear red, green and blue: Machado, Oliveira, Fernandes 2009, severity 1
    "common": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "deuteranopia": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "tritanopia": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}


@pytest.mark.parametrize("sight", SIGHTS)
def test_kinds_are_told_apart_by_all_eyes(sight: str) -> None:
    """In CIELAB, where 2.3 is the least difference that one sees."""

    def seen(colour: str) -> tuple[float, float, float]:
        parts = [
            min(max(sum(map(math.prod, zip(row, linear(colour), strict=True))), 0.0), 1.0) for row in SIGHTS[sight]
        ]
        white = (0.9505, 1.0, 1.089)
        rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
        x, y, z = (
            math.cbrt(max(sum(map(math.prod, zip(row, parts, strict=True))) / of, 0.009))
            for row, of in zip(rows, white, strict=True)
        )
        return 116 * y, 500 * (x - y), 200 * (y - z)

    copies = {kind for kind in HUES if DATAFLOW[kind].stream in COPIES}  # which have lanes of their own
    for one, other in combinations((*(hue for kind, hue in HUES.items() if kind not in copies), *SPARE), 2):
        for chunk in range(2):
            assert math.dist(seen(mixed(one, chunk, 2)), seen(mixed(other, chunk, 2))) > 4 * 2.3
