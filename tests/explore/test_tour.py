"""The tour: what its texts claim, when its steps are reached, and how the page shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeflow.core.analysis.measures import Measures
from pipeflow.core.errors import UsageError
from pipeflow.core.text import number, percent
from pipeflow.schedules import SCHEDULES
from pipeflow.tools.cli import explore
from pipeflow.tools.cli.command import parser
from pipeflow.tools.explore.answers import tour
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.tour import STEPS, TourStep
from tests.browser import MARKS
from tests.explore.explorer import Explorer


class Facts:
    """The measures of a schedule, as the texts write them."""

    def __init__(self, name: str, microbatches: int = 8, ranks: int = 4, **more: object) -> None:
        sizes = {"schedule": name, "ranks": ranks, "microbatches": microbatches, **more}
        self.state = State.of({field: str(value) for field, value in sizes.items()})
        self.schedule = self.state.schedule(name)
        self.timeline = self.state.timeline(name)
        self.measures = Measures.of(self.schedule, self.timeline)
        self.time = number(self.timeline.makespan)
        self.idle = number(self.timeline.makespan - self.timeline.work)
        self.bubble = percent(self.timeline.makespan_bubble_ratio)
        self.stages = str(self.schedule.placement.num_stages)
        self.peaks = [number(peak) for peak in self.timeline.peak_activations]
        self.peak = number(self.measures.peak_activations)
        self.sent = str(self.measures.transfers)


def first_under_ten_percent(ranks: int) -> str:
    """The smallest number of microbatches with which the bubble of GPipe is under 10%."""
    drawn = ((each, Facts("gpipe", each, ranks).timeline) for each in range(1, 200))
    return str(next(each for each, timeline in drawn if 10 * (timeline.makespan - timeline.work) < timeline.makespan))


def later(name: str, latency: float) -> str:
    """By how much a latency makes a schedule longer."""
    return number(Facts(name, latency=latency).timeline.makespan - Facts(name).timeline.makespan)


def waits(name: str, **more: object) -> float:
    """How long the last rank waits for its first input."""
    return Facts(name, **more).timeline.rows[3][0].start  # type: ignore[arg-type]  # `more` has no positional sizes


def figures() -> dict[str, list[str]]:
    """Per step, every number that its texts name, computed."""
    gpipe, f1b, inter = Facts("gpipe"), Facts("1f1b"), Facts("interleaved-1f1b")
    four, eager, h1, v = Facts("interleaved-1f1b", chunks=4), Facts("eager-1f1b"), Facts("zb-h1"), Facts("zb-v")
    half, least, one = Facts("v-half"), Facts("v-min"), Facts("gpipe", 1)
    slow = {name: Facts(name, latency=0.5) for name in ("1f1b", "eager-1f1b", "interleaved-1f1b")}
    slower = {name: Facts(name, latency=1) for name in slow}
    needed = first_under_ten_percent(4)
    names = "1F1B 1f1b zb-h1 v-half eager-1f1b interleaved-1f1b"
    waited = number(waits("1f1b"))
    return {
        "A pipeline": [gpipe.stages, "3", "2", "1", "0", waited, one.bubble, "4", Facts("gpipe", 4).bubble],
        "Fill it": ["10%", needed, waited, gpipe.idle, "1", first_under_ten_percent(8), "8"],
        "1F1B": [
            names,
            gpipe.peak,
            f1b.peaks[0],
            f1b.peaks[3],
            "0",
            "3",
            f1b.time,
            gpipe.time,
            f1b.bubble,
            gpipe.bubble,
        ],
        "More microbatches": ["10%", f1b.peak, "8", "0", needed, Facts("1f1b", int(needed)).bubble],
        "Interleaving": [
            *(f1b.time, inter.stages, inter.time, inter.bubble, four.time, four.bubble, f1b.sent, inter.sent),
            *(four.sent, inter.peak, f1b.peak, "8", "0", "3", waited, number(waits("interleaved-1f1b") * 2), "2", "4"),
        ],
        "Transfers": [
            *("0.5", "1", "0", f1b.time, later("eager-1f1b", 0.5), eager.peak, f1b.peak),
            *(each.time for each in slow.values()),
            *(slower["interleaved-1f1b"].time, slower["eager-1f1b"].time),
        ],
        "Weight gradients": [h1.time, f1b.time, h1.bubble, h1.idle, f1b.idle, h1.peak, h1.sent],
        "No weight gradients": [
            *("0", "1", "2", "0.5", Facts("zb-h1", backward_weight=0).time, Facts("zb-h1", backward_weight=0).bubble),
            *(Facts("zb-h1", backward_weight=each).idle for each in (0.5, 1, 2)),
        ],
        "Zero bubble": [
            *(h1.idle, v.stages, "0", "3", v.time, v.bubble, v.idle, number(waits("zb-v") * 2)),
            *(percent(v.timeline.bubble_ratio), v.sent, h1.sent, v.peak),
        ],
        "Less memory": [
            *(v.peak, half.peak, half.time, least.peak, least.time, f1b.time),
            *(number(each.timeline.makespan - v.timeline.makespan) for each in (half, least)),
        ],
    }


FIGURES = figures()


def texts(step: TourStep) -> str:
    """All texts of a step, without the names of schedules."""
    told = " ".join((step.question, step.look, step.task, step.answer, step.cost))
    return re.sub("|".join(sorted(SCHEDULES, key=len, reverse=True)), "", told)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?%?", text))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.title)
def test_every_number_of_a_text_is_computed(step: TourStep) -> None:
    assert numbers(texts(step)) - set(FIGURES[step.title]) == set()


def test_what_the_texts_claim_of_figures_holds() -> None:
    gpipe, f1b, h1, v, least = map(Facts, ("gpipe", "1f1b", "zb-h1", "zb-v", "v-min"))
    for ranks, microbatches in ((4, 4), (4, 28), (8, 64)):
        formula = (ranks - 1) / (microbatches + ranks - 1)
        assert Facts("gpipe", microbatches, ranks).timeline.makespan_bubble_ratio == pytest.approx(formula)
        assert Facts("gpipe", microbatches).idle == gpipe.idle
    assert Facts("gpipe", 28).peaks == ["28"] * 4
    assert gpipe.peaks == ["8"] * 4
    assert f1b.time == gpipe.time
    assert Facts("1f1b", 28).peak == f1b.peak
    assert float(later("1f1b", 0.5)) > float(later("gpipe", 0.5))
    assert min(("1f1b", "interleaved-1f1b", "eager-1f1b"), key=lambda name: float(later(name, 0.5))) == "eager-1f1b"
    assert Facts("interleaved-1f1b").schedule.placement.stages_of(0) == (0, 4)
    assert (h1.peak, h1.sent) == (f1b.peak, f1b.sent)
    for more in ({}, {"backward_input": 2}):
        assert Facts("zb-h1", backward_weight=0, **more).time == Facts("1f1b", backward_weight=0, **more).time
    assert [v.schedule.placement.stages_of(rank) for rank in (0, 3)] == [(0, 7), (3, 4)]
    assert v.peaks == [f1b.peak] * 4
    for row in v.timeline.rows:
        assert row[-1].end - row[0].start == pytest.approx(v.timeline.work)
    assert float(v.idle) == waits("zb-v")
    assert float(least.peak) * 2 == float(f1b.peak)
    assert float(Facts("zb-v", backward_weight=0.5).timeline.bubble_ratio) > 0


def test_no_schedule_is_best_in_time_memory_and_transfers() -> None:
    found = [Facts(name).measures for name in SCHEDULES]
    best = [min(getattr(each, name) for each in found) for name in ("makespan", "peak_activations", "transfers")]
    assert best not in [[each.makespan, each.peak_activations, each.transfers] for each in found]


def reached(fields: Mapping[str, str]) -> list[int]:
    return list(tour(fields)["reached"])


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.title)
def test_a_step_is_reached_by_its_goal_and_not_at_its_start(step: TourStep) -> None:
    number = STEPS.index(step) + 1
    assert number not in reached(step.start)
    assert number in reached(step.goal)
    assert step.as_json()["controls"]
    for fields in step.more.values():
        assert reached(fields) is not None


def test_conditions_are_about_what_is_shown() -> None:
    fields = STEPS[1].start
    assert 2 not in reached({**fields, "microbatches": "27"})
    assert 2 in reached({**fields, "microbatches": "28"})
    assert 2 not in reached({**fields, "microbatches": "28", "ranks": "8"})
    assert 2 not in reached({**fields, "ranks": "1"})
    assert 3 in reached({**STEPS[2].start, "schedule": "gpipe,1f1b"})
    assert 5 not in reached({**STEPS[4].goal, "chunks": "1"})
    assert 6 not in reached({**STEPS[5].start, "latency": "0.45"})


def test_the_command_starts_the_tour_and_opens_a_state() -> None:
    def opened(*words: str) -> dict[str, str]:
        return explore.fields(parser("explore").parse_args(["explore", *words]))

    assert opened("--tour") == {"tour": "1", **STEPS[0].start}
    assert opened("--tour", "3") == {"tour": "3", **STEPS[2].start}
    with pytest.raises(UsageError, match="steps 1 to 10, got 11"):
        opened("--tour", "11")
    assert opened("--link", "#schedule=zb-v&tour=9", "--ranks", "8") == {"ranks": "8", "schedule": "zb-v", "tour": "9"}
    with pytest.raises(UsageError, match="unknown field 'colours'"):
        opened("--link", "#colours=1")


def test_the_documentation_has_every_question() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explore.md").read_text(encoding="utf-8")
    asked = re.findall(r"^\d+\. (.*?)  *`pipeflow explore --tour (\d+)`$", page, re.MULTILINE)
    assert asked == [(step.question, str(number)) for number, step in enumerate(STEPS, 1)]


class TestPage:
    """In a browser."""

    pytestmark = MARKS

    def answer(self, explorer: Explorer) -> str:
        return explorer.text("#tour .answer")

    def press(self, explorer: Explorer, name: str) -> Explorer:
        for each in explorer.browser.find_elements("css selector", ".bar button, #tour button"):
            if each.get_property("textContent") == name:
                each.click()
                return explorer.settled()
        raise AssertionError(f"there is no button {name}")

    @pytest.mark.exhaustive
    def test_a_reader_takes_the_tour(self, explorer: Explorer) -> None:
        self.press(explorer.open(schedule="zb-v"), "Tour")
        assert explorer.fields == {"tour": "1", "schedule": "gpipe", "microbatches": "1"}
        for place, step in enumerate(STEPS, 1):
            assert explorer.text("#tour h2") == step.question
            assert explorer.browser.switch_to.active_element.text == step.question
            assert explorer.find("#tour select").get_property("value") == str(place)
            assert self.answer(explorer) == ""
            asked = explorer.browser.find_elements("css selector", ".control.asked")
            assert len(asked) == len(step.as_json()["controls"])
            self.press(explorer, "Show me")
            assert step.answer in self.answer(explorer)
            self.press(explorer, "Next" if place < len(STEPS) else "Finish")
        assert not explorer.find("#tour").is_displayed()
        assert "tour" not in explorer.fields
        assert explorer.browser.find_elements("css selector", ".control.asked") == []

    def test_the_answer_appears_when_it_is_reached_and_stays(self, explorer: Explorer) -> None:
        explorer.open(tour=2, **STEPS[1].start)
        explorer.set("microbatches", 27)
        assert self.answer(explorer) == ""
        explorer.set("microbatches", 28)
        assert STEPS[1].answer in self.answer(explorer)
        explorer.set("microbatches", 5)
        assert STEPS[1].answer in self.answer(explorer)
        explorer.browser.back()
        explorer.settled().browser.refresh()
        assert STEPS[1].answer in self.answer(explorer)

    @pytest.mark.exhaustive
    def test_leaving_and_coming_back_loses_nothing(self, explorer: Explorer) -> None:
        explorer.open(tour=4, **STEPS[3].start).set("microbatches", 11)
        before = explorer.fields
        self.press(explorer, "Leave").set("ranks", 6)
        assert not explorer.find("#tour").is_displayed()
        self.press(explorer, "Tour")
        assert explorer.fields == before
        self.press(explorer, "Back")
        assert explorer.text("#tour h2") == STEPS[2].question
        explorer.browser.back()
        explorer.settled()
        assert explorer.fields == before
        assert explorer.text("#tour h2") == STEPS[3].question

    @pytest.mark.exhaustive
    def test_a_further_link_keeps_the_step(self, explorer: Explorer) -> None:
        explorer.open(tour=3, **STEPS[2].goal)
        explorer.find("#tour .more a").click()
        assert explorer.text("h2", 2) == "1f1b, 4 ranks, 8 microbatches"
        assert explorer.fields["tour"] == "3"
        assert STEPS[2].answer in self.answer(explorer)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("number", ["99", "0", "x"])
    def test_a_step_that_is_not_there(self, explorer: Explorer, number: str) -> None:
        if number == "99":
            assert explorer.open(tour=number).text("#tour h2") == STEPS[-1].question
        else:
            explorer.browser.get(f"{explorer.server.url}#tour={number}")
            assert not explorer.find("#tour").is_displayed()
            explorer.complaints()  # the server refuses it

    @pytest.mark.exhaustive
    def test_a_phone_shows_the_controls_that_are_asked_for(self, explorer: Explorer) -> None:
        size: dict[str, Any] = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        explorer.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            explorer.open(tour=5, **STEPS[4].goal)
            shown = [each for each in explorer.browser.find_elements("css selector", ".control") if each.is_displayed()]
            assert len(shown) == 2
            assert explorer.browser.execute_script("return document.documentElement.scrollWidth") <= 390
            tops = [explorer.find(place).rect["y"] for place in ("#tour", "#controls", "#charts")]
            assert tops == sorted(tops)
        finally:
            explorer.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
