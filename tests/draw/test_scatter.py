from __future__ import annotations

import math
import re
from itertools import combinations, pairwise
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeflow.draw import Axis, Point, Scatter, Table, scatter_svg
from pipeflow.draw.plane import front, place_labels
from tests.draw.test_gantt import draw

X, Y = Axis("memory", "{:.4g}".format), Axis("bubble", "{:.0%}".format)
POINTS = [Point("a", 1, 0.4), Point("b", 2, 0.2), Point("c", 3, 0.3), Point("d", 4, 0.1), Point("e", 2, 0.2)]
plane = st.lists(st.builds(Point, st.just("p"), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30)


def test_the_front_is_what_no_other_point_beats() -> None:
    assert [point.name for point in front(POINTS)] == ["a", "b", "e", "d"]


@given(plane)
def test_the_front_by_its_definition(points: list[Point]) -> None:
    def beaten(point: Point) -> bool:
        return any(
            other.x <= point.x and other.y <= point.y and (other.x, other.y) != (point.x, point.y) for other in points
        )

    assert sorted(front(points)) == sorted(point for point in points if not beaten(point))


def touches(line: tuple[tuple[float, float], ...], box: tuple[float, ...]) -> bool:
    """Whether one of 500 places on a line is inside a box: left, top, right, bottom."""
    (x, y), (to_x, to_y) = line
    places = ((x + (to_x - x) * part / 500, y + (to_y - y) * part / 500) for part in range(501))
    return any(box[0] + 0.05 < left < box[2] - 0.05 and box[1] + 0.05 < top < box[3] - 0.05 for left, top in places)


@given(plane)
def test_labels_overlap_nothing_and_stay_inside(points: list[Point]) -> None:
    anchors = [(float(x), float(y)) for _, x, y in points]
    labels = place_labels(anchors, [(2, 1)] * len(points), (1, 1), (0, 0, 12, 10), leftwards={0})
    boxes = [label.box[:2] for label in labels if label]
    for index, (left, top) in enumerate(boxes):
        assert 0 <= left <= 10
        assert 0 <= top <= 9
        assert all(abs(left - other[0]) >= 2 or abs(top - other[1]) >= 1 for other in boxes[:index])
        assert all(not (left - 0.5 < x < left + 2.5 and top - 0.5 < y < top + 1.5) for x, y in anchors)


@pytest.mark.parametrize("seed", range(4))
def test_leaders_and_lines_cross_no_label_and_no_other_point(seed: int) -> None:
    random = Random(seed)
    anchors = [(40 * random.random(), 20 * random.random()) for _ in range(50)]
    lines = [((0.0, 0.0), (40.0, 20.0)), ((10.0, 0.0), (10.0, 20.0))]
    labels = place_labels(anchors, [(5, 1)] * 50, (1, 1), (0, 0, 40, 20), lines=lines, reach=20, beside=1.2)
    found = [(anchor, label) for anchor, label in zip(anchors, labels, strict=True) if label]
    assert sum(label.leader is not None for _, label in found) > 5
    for anchor, (box, leader) in found:
        assert not any(touches(line, box) for line in (*lines, *(each.leader for _, each in found if each.leader)))
        across, down = (max(box[at] - anchor[at], anchor[at] - box[at + 2], 0) for at in (0, 1))
        assert (leader is None) == (math.hypot(across, down) <= 1.2)
        marks = [(x - 0.3, y - 0.3, x + 0.3, y + 0.3) for x, y in anchors if math.dist((x, y), anchor) > 0.8]
        assert leader is None or not any(touches(leader, mark) for mark in marks)


def test_ticks_are_round_and_reach_the_highest() -> None:
    assert Axis("", str).ticks([0.01, 0.33], 7) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert Axis("", str, base=1024).ticks([30 * 2**30], 5) == [0, 10 * 2**30, 20 * 2**30, 30 * 2**30]
    assert Axis("", str).ticks([0], 5)[0] == 0


def test_ticks_of_values_close_together_begin_below_the_lowest() -> None:
    assert Axis("", str).ticks([83.6, 97.1, 88], 6) == [80, 85, 90, 95, 100]
    assert Axis("", str, base=1024).ticks([67.5 * 2**30, 76 * 2**30], 6) == [each * 2**30 for each in range(66, 78, 2)]
    assert Axis("", str).ticks([5.0, 5.0], 5)[0] == 0


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_point_is_named_within_the_width(width: int) -> None:
    drawing = draw(Scatter(POINTS, X, Y), width)
    assert drawing.isascii()
    assert max(map(len, drawing.splitlines())) <= width
    assert re.search(r"\* b, e|b, e \*", drawing)
    assert re.search(r"o c|c o", drawing)
    assert drawing.splitlines()[0] == "bubble against memory"


def test_points_that_find_no_room_for_their_name_are_listed() -> None:
    crowd = [Point(f"a-very-long-name-{index}", index / 1000, index / 1000) for index in range(60)]
    drawing = draw(Scatter([*crowd, Point("far", 9, 9)], X, Y))
    assert all(point.name in drawing.replace("\n", " ") for point in crowd)


def test_points_at_zero_are_drawn() -> None:
    assert "nothing" in draw(Scatter([Point("nothing", 0, 0)], X, Y))
    assert "nothing" in scatter_svg([Point("nothing", 0, 0)], X, Y)


def test_the_svg_has_every_point_where_it_belongs() -> None:
    root = ElementTree.fromstring(scatter_svg([*POINTS, Point("<&>", 5, 0.5)], X, Y))
    tag = "{http://www.w3.org/2000/svg}"
    circles = {circle.find(f"{tag}title").text: circle for circle in root.iter(f"{tag}circle")}  # type: ignore[union-attr]
    assert set(circles) == {"a", "b, e", "c", "d", "<&>"}
    assert {name for name, circle in circles.items() if circle.get("class") == "best"} == {"a", "b, e", "d"}
    places = {name: (float(circle.get("cx", "")), float(circle.get("cy", ""))) for name, circle in circles.items()}
    assert places["a"][0] < places["b, e"][0] < places["c"][0] < places["d"][0]
    assert places["d"][1] > places["b, e"][1] > places["c"][1] > places["a"][1]  # down is less
    assert all(math.isfinite(number) for place in places.values() for number in place)
    words = {"".join(text.itertext()) for text in root.iter(f"{tag}text")}
    assert {"a", "b, e", "c", "d", "<&>", "memory", "bubble"} <= words


def test_a_table_marks_the_best_and_lines_up() -> None:
    table = Table(
        ["name", "long\ntitle", "n"], [["one", "1.5", "20"], ["other", "10", "3"]], frozenset({(0, 1), (1, 2)})
    )
    assert draw(table) == """\
       long
name  title   n
one     1.5* 20
other    10   3*
"""  # fmt: skip


def test_columns_without_room_stand_below() -> None:
    table = Table(["name", "first", "second"], [["one", "1", "2"]])
    assert draw(table, 13) == "name first\none      1\n\nname second\none       2\n"


def read_svg(points: list[Point]) -> tuple[list[tuple[float, float]], list[tuple[str, float, float]], float]:
    """The dots, the texts of names with their places, and how high the picture is."""
    root = ElementTree.fromstring(scatter_svg(points, X, Y))
    tag = "{http://www.w3.org/2000/svg}"
    dots = [(float(circle.get("cx", "")), float(circle.get("cy", ""))) for circle in root.iter(f"{tag}circle")]
    texts = [
        ("".join(text.itertext()), float(text.get("x", "")), float(text.get("y", "")))
        for text in root.iter(f"{tag}text")
    ]
    return dots, texts, float(root.get("height", ""))


CROWDS = [
    [Point(f"schedule-{index}", 4 + index % 3, 0.11 + index // 3 * 0.004) for index in range(24)],
    [Point(f"schedule-{index}", 4, 0.11) for index in range(40)],
    [Point(f"a-rather-long-name-of-a-file-{index}.csv", 1 + 0.01 * index, 0.2 + 0.003 * index) for index in range(90)],
    [Point(f"named-{index}", index / 7, 1 - index / 700) for index in range(700)],  # more than there is room for
]


@pytest.mark.some(2)
@pytest.mark.parametrize("points", CROWDS, ids=["near", "one place", "long", "many"])
def test_the_svg_names_every_point_and_hides_none(points: list[Point]) -> None:
    dots, texts, height = read_svg(points)
    words = [word.strip() for text, _, _ in texts for word in text.split(",")]
    assert all(words.count(point.name) == 1 for point in points)
    assert all(math.dist(one, other) >= 3.5 for one, other in combinations(dots, 2))
    assert all(0 < y < height for _, _, y in texts)


def test_a_name_away_from_its_point_has_a_line_to_it() -> None:
    text = scatter_svg([Point("apart", 0, 0), *CROWDS[0]], X, Y)
    assert text.count('class="leader"') > 0
    assert 'class="leader"' not in scatter_svg(POINTS, X, Y)


STEPPED = [  # schedules of 2 ranks and 4 microbatches; several lie on the line of the front
    *(Point(name, 2, 0.2) for name in ("1f1b", "hanayo")),
    *(Point(name, 2, 1 / 13) for name in ("zb-h1", "gis", "zb-auto")),
    *(Point(name, 2, 0.04) for name in ("zb-v", "v-half", "v-min", "interleaved-zb")),
    *(Point("gis-h", 1.5, 1 / 9), Point("chimera", 2, 0), Point("dualpipe", 3, 0), Point("dualpipe-v", 2.5, 1 / 13)),
    *(Point("eager-1f1b", 3, 0.2), Point("gpipe", 4, 0.2), Point("looped-bfs", 4, 1 / 9), Point("zb-h2", 3, 1 / 13)),
    Point("interleaved-1f1b", 2.5, 1 / 9),
]


@pytest.mark.parametrize("points", [STEPPED, CROWDS[0]], ids=["stepped", "near"])
@pytest.mark.parametrize("width", [326, 390, 800, 1280])
def test_no_name_lies_over_a_line_or_another_name(points: list[Point], width: int) -> None:
    root = ElementTree.fromstring(scatter_svg(points, X, Y, width=width))
    tag = "{http://www.w3.org/2000/svg}"
    lines = [
        pair
        for path in root.iter(f"{tag}path")
        if path.get("class") in {"front", "leader"}
        for pair in pairwise((float(x), float(y)) for x, y in map(str.split, path.get("d", "")[1:].split("L")))
    ]
    boxes = []
    for text in root.iter(f"{tag}text"):
        if text.get("class", "").startswith("name"):
            wide, x, y = 7.4 * len("".join(text.itertext())), float(text.get("x", "")), float(text.get("y", ""))
            left = x - wide * (text.get("text-anchor") == "end")
            boxes.append((left, y - 13, left + wide, y + 4))
    assert len(lines) > 2
    assert len(boxes) > 6
    assert not [(box, line) for box in boxes for line in lines if touches(line, box)]
    assert all(
        one[0] >= two[2] or two[0] >= one[2] or one[1] >= two[3] - 0.1 or two[1] >= one[3] - 0.1
        for one, two in combinations(boxes, 2)
    )
