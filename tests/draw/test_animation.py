"""The animated picture shows the timelines, moves as they say, and is whole where nothing moves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from pipeflow import UsageError, with_offload
from pipeflow.core.action import Entry
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.program import Compute, Send
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.draw import animated_svg
from pipeflow.draw.animation import FLIGHT, LEAD, PLAY, TURN
from pipeflow.schedules import make_schedule
from tests.draw.samples import SAMPLES, planned

NAMESPACE = "{http://www.w3.org/2000/svg}"
Element = ElementTree.Element
NAMES = ("gpipe", "1f1b", "zb-v")


def parsed(*timelines: Timeline) -> Element:
    return ElementTree.fromstring(animated_svg(timelines))


def looking(root: Element, look: str) -> list[Element]:
    return [element for element in root.iter() if look in element.get("class", "").split()]


def number(element: Element, name: str) -> float:
    return float(element.get(name, "0"))


def tokens(root: Element) -> list[tuple[float, str]]:
    """Per token, the middle of its flight as a share of the longest step, and its microbatch."""
    found = []
    for token in looking(root, "token"):
        delay = re.match(r"animation-delay:(-?[\d.]+)s", token.get("style", ""))
        assert delay is not None
        place = (float(delay[1]) + TURN + FLIGHT / 2 - LEAD) / PLAY
        found.append((place, token[1].text or ""))
    return found


def sent(schedule: Schedule, timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Per transfer of the programs that ranks run: when its value is made, as a share of the step; its microbatch."""
    ends: dict[Entry, float] = {span.action: span.end for span in timeline}
    for program in lower(schedule):
        made = 0.0
        for each in program.instructions:
            if isinstance(each, Compute):
                made = ends[each.entry] / timeline.makespan
            elif isinstance(each, Send):
                yield made, str(each.value.microbatch)


@pytest.mark.parametrize("name", [*NAMES, "offloaded"])
def test_each_transfer_is_a_token_that_passes_when_its_value_is_made(name: str) -> None:
    schedule = make_schedule("1f1b" if name == "offloaded" else name, ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement, offload=1 if name == "offloaded" else 0)
    schedule = with_offload(schedule, cost) if name == "offloaded" else schedule
    timeline = simulate(schedule, cost)
    found, expected = sorted(tokens(parsed(timeline))), sorted(sent(schedule, timeline))
    assert Counter(text for _, text in found) == Counter(text for _, text in expected)
    assert [place for place, _ in found] == pytest.approx([place for place, _ in expected], abs=1e-3)


def test_what_glows_is_the_share_that_is_written_and_all_have_one_scale() -> None:
    timelines = [planned(name) for name in NAMES]
    root = parsed(*timelines)
    lanes = looking(root, "lane")[:12]
    glowing = [group for group in looking(root, "glow") if group.tag == f"{NAMESPACE}g"]
    shares = [text.text for text in looking(root, "share")]
    assert shares == ["27 % idle", "27 % idle", "6 % idle"]
    scales = []
    for index, (timeline, group) in enumerate(zip(timelines, glowing, strict=True)):
        width = number(lanes[4 * index], "width")
        idle = sum(number(rect, "width") + 1 for rect in group)
        assert f"{100 * idle / width / 4:.0f} % idle" == shares[index]
        scales.append(width / timeline.makespan)
    assert scales == pytest.approx(scales[:1] * 3)
    assert "23 % less time" in [text.text for text in root.iter(f"{NAMESPACE}text")]


def test_it_is_whole_without_motion_and_runs_no_script() -> None:
    text = animated_svg([planned(name) for name in NAMES])
    style = text.partition("<style>")[2].partition("</style>")[0]
    still, moving = style.partition("@media (prefers-reduced-motion:no-preference){")[::2]
    assert "animation:" not in still
    for look in ("veil", "now", "token"):
        assert re.search(rf"\.{look}\b[^}}]*\{{[^}}]*opacity:0\b", still)
        assert f".{look}{{animation:pipeflow-{look} " in moving
        assert f"@keyframes pipeflow-{look}{{" in moving
    assert not re.search(r"<script|<image|href|url\(|@import", text)


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "dense"])
def test_any_timeline_can_move(name: str) -> None:
    assert parsed(SAMPLES[name]).get("viewBox")
    root = parsed(SAMPLES[name], replace(planned(), unit=SAMPLES[name].unit))
    assert len([group for group in looking(root, "glow") if group.tag == f"{NAMESPACE}g"]) == 2
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")


def test_different_units_are_refused() -> None:
    with pytest.raises(UsageError, match="different units of time"):
        animated_svg([planned(), replace(SAMPLES["measured"], unit="s")])


def test_more_than_such_a_picture_can_show_is_refused() -> None:
    with pytest.raises(UsageError, match="up to 5000 actions, not 6000"):
        animated_svg(SAMPLES["dense"])
