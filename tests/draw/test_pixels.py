"""The image of a timeline has its spans where they belong, in their colours."""

from __future__ import annotations

import pytest

from pipeflow import CostModel, UsageError, make_schedule, simulate
from pipeflow.core.action import Kind
from pipeflow.core.timeline import Timeline
from pipeflow.draw.colours import LIGHT, shade
from pipeflow.draw.image import GAP, Pixels, pixels
from pipeflow.draw.lane_times import heights


def planned(name: str = "1f1b", ranks: int = 2, microbatches: int = 4, *, reductions: bool = False) -> Timeline:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    schedule = schedule.with_reductions() if reductions else schedule
    return simulate(schedule, CostModel.even(schedule.placement, forward=1))


def colour(image: Pixels, x: float, y: float) -> str:
    start = 3 * (int(y) * image.width + int(x))
    return "#" + image.rgb[start : start + 3].hex()


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), [("1f1b", 2, 4), ("zb-h1", 4, 8), ("interleaved-1f1b", 12, 12)]
)
def test_spans_lie_where_they_ran(name: str, ranks: int, microbatches: int) -> None:
    timeline = planned(name, ranks, microbatches)
    image = pixels(timeline, 1000)
    size = heights(ranks)
    assert len(image.rgb) == 3 * image.width * image.height
    assert image.height == ranks * size.lane + (ranks - 1) * size.gap
    spans = [span for span in timeline if span.end > span.start]
    shortest = min(span.end - span.start for span in spans)
    scale = int(1000 * shortest / timeline.makespan) / shortest  # a whole number of pixels per shortest span
    for span in spans:
        stages = timeline.placement.stages_of(span.rank)
        wanted = shade(span.action.kind, stages.index(span.action.stage), len(stages))
        x, top = scale * (span.start + span.end) / 2, span.rank * (size.lane + size.gap)
        assert {colour(image, x, top), colour(image, x, top + size.lane - 1)} == {wanted}
        assert colour(image, scale * span.end - 1, top) == LIGHT.lane  # a gap before the next one
    assert colour(image, 0, size.lane) == LIGHT.background
    first = timeline.rows[-1][0]
    assert colour(image, scale * first.start / 2, image.height - 1) == LIGHT.lane  # idle
    assert colour(image, 999, 0) == (LIGHT.background if scale * timeline.makespan < 999 else colour(image, 999, 1))


def test_timelines_have_one_scale() -> None:
    long, short = planned(microbatches=8), planned(microbatches=4)
    image, alone = pixels([long, short], 600), pixels(long, 600)
    assert image.height == 2 * alone.height + GAP
    assert image.rgb[: len(alone.rgb)] == alone.rgb
    end = int(600 * short.makespan / long.makespan)
    lower = alone.height + GAP
    assert colour(image, end + 3, lower) == LIGHT.background
    assert colour(image, 1, lower) != LIGHT.background


def test_reductions_have_lanes_of_their_own() -> None:
    timeline = planned(reductions=True)
    assert pixels(timeline).height == 2 * 24 + 8  # they take no time
    schedule = make_schedule("1f1b", ranks=2, microbatches=4).with_reductions()
    cost = CostModel.even(schedule.placement, forward=1, reduce=2)
    assert pixels(simulate(schedule, cost)).height == 2 * (24 + 10) + 8


def test_a_timeline_with_more_spans_than_pixels() -> None:
    image = pixels(planned("1f1b", 4, 400), 100)
    assert (image.width, len(image.rgb)) == (100, 300 * image.height)
    forward, backward = (bytes.fromhex(shade(kind, 0, 1)[1:]) for kind in (Kind.F, Kind.B))
    for x in range(5, 95):  # the average of the steady state in every column
        seen = bytes.fromhex(colour(image, x, 0)[1:])
        assert all(abs(part - (one + 2 * two) / 3) < 8 for part, one, two in zip(seen, forward, backward, strict=True))


def test_there_must_be_a_timeline() -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        pixels([])
