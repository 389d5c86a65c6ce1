"""The explorer as one file with prebuilt answers."""

from __future__ import annotations

import base64
import hashlib
import re
import runpy
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.draw.captions import heading
from pipeflow.schedules import SCHEDULES
from pipeflow.tools.cli import explore
from pipeflow.tools.cli.command import parser
from pipeflow.tools.explore.fields import FIELDS
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.tour import STEPS
from tests.browser import MARKS
from tests.explore.explorer import Explorer

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "explorer.py"))
name, prebuilt = MADE["name"], MADE["prebuilt"]
STATES = [
    {},
    {"schedule": "zb-v", "microbatches": "5"},
    {"schedule": "gpipe,interleaved-1f1b", "chunks": "3", "latency": "0.5"},
    STEPS[1].start,
    STEPS[1].goal,
]


@pytest.fixture(scope="module")
def page() -> str:
    text: str = prebuilt({"plan": STATES, "tour": STATES}, {"microbatches": (1, 30, 1), "latency": (0, 1, 0.5)})
    return text


def test_the_page_runs_its_own_script_only_and_loads_nothing(page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert unescape(policy[1]).split("; ") == [
        *("default-src 'none'", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'", "img-src data: blob:"),
    ]
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert not re.search(r"^(?:import|export)\b", scripts[0], re.MULTILINE)
    assert "fetch(" not in scripts[0]


def test_names_of_answers_leave_out_what_changes_nothing() -> None:
    assert name({}) == name({"schedule": "1f1b", "ranks": "4", "tour": "3", "chunks": "2", "latency": ""}) == ""
    assert name({"schedule": "zb-v", "chunks": "2"}) == "schedule=zb-v"
    both = {"chunks": "2", "schedule": "gpipe,gis"}
    assert name(both) == name(dict(reversed(both.items()))) == "schedule=gpipe,gis&chunks=2"


def test_a_state_that_cannot_be_shown_is_an_error() -> None:
    with pytest.raises(UsageError, match="even"):
        prebuilt({"plan": [{"schedule": "chimera", "ranks": "3"}]}, {})


class TestPage:
    """In a browser."""

    pytestmark = MARKS

    @pytest.fixture
    def opened(self, browser: Any, page: str, tmp_path: Path) -> Iterator[Explorer]:
        file = tmp_path / "page.html"
        file.write_text(page, encoding="utf-8")
        explorer = Explorer(browser, SimpleNamespace(url=file.as_uri()))  # type: ignore[arg-type]  # an address is enough
        explorer.complaints()
        yield explorer
        assert explorer.complaints() == []

    @pytest.mark.some(2)
    @pytest.mark.parametrize("fields", STATES, ids=name)
    def test_it_shows_its_states(self, opened: Explorer, fields: dict[str, str]) -> None:
        opened.open(**fields)
        state = State.of(fields)
        shown = [
            each.get_property("textContent") for each in opened.browser.find_elements("css selector", "section h2")
        ]
        assert shown == [heading(state.timeline(each)) for each in state.schedules]
        longest = max(state.timeline(each).makespan for each in state.schedules)
        assert float(opened.text("#view").split()[2]) == pytest.approx(longest, rel=0.01)  # of the lanes themselves
        entries = opened.browser.execute_script(
            "return performance.getEntriesByType('resource').map((each) => each.name)"
        )
        assert [each for each in entries if not each.startswith("data:")] == []

    @pytest.mark.exhaustive
    def test_a_control_leads_to_another_state_and_back(self, opened: Explorer) -> None:
        opened.open(schedule="gpipe", ranks=4, microbatches=4, tour=2)
        opened.set("microbatches", 28)
        assert opened.text("section h2") == "gpipe, 4 ranks, 28 microbatches"
        assert STEPS[1].answer in opened.text("#tour .answer")
        opened.browser.back()
        assert opened.text("section h2") == "gpipe, 4 ranks, 4 microbatches"
        controls = opened.unfold().browser.find_elements("css selector", ".control")
        names = [each.find_element("css selector", "label").text for each in controls if each.is_displayed()]
        assert names == ["schedule", "microbatches", "latency"]

    @pytest.mark.exhaustive
    def test_another_state_is_refused_with_the_command_that_shows_it(self, opened: Explorer) -> None:
        opened.open(schedule="zb-v", microbatches=5).set("latency", 0.5)
        assert opened.text("section h2") == "zb-v, 4 ranks, 2 chunks, 5 microbatches"
        command = opened.text("#problem").partition("--link ")[2].strip("'")
        fields = explore.fields(parser("explore").parse_args(["explore", "--link", command]))
        assert fields == {"schedule": "zb-v", "microbatches": "5", "latency": "0.5"}
        assert opened.set("latency", 0).find("#problem").get_property("hidden")


@pytest.mark.slow
def test_it_has_the_tour_every_schedule_and_what_its_sliders_set() -> None:
    names = {name(fields) for fields in MADE["drawn"]()}
    assert {name(fields) for fields in MADE["tour"]()} <= names
    assert {name({"schedule": schedule}) for schedule in SCHEDULES} <= names
    for field in ("latency", "backward_weight"):
        least, most, step = MADE["SLIDERS"][field]
        for each in range(round((most - least) / step) + 1):
            assert name({"schedule": "zb-h1", field: f"{least + each * step:g}"}) in names
    assert set(MADE["SLIDERS"]) <= set(FIELDS)


@pytest.mark.exhaustive
def test_it_is_small_enough_for_a_document(tmp_path: Path) -> None:
    MADE["write"](tmp_path)
    assert (tmp_path / MADE["FILE"]).stat().st_size < 700_000


@pytest.mark.slow
def test_commands_in_documents_lead_to_states_that_it_has() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*DOCS.glob("*.md"), DOCS.parent / "README.md")]
    commands = {command for text in texts for command in re.findall(r"`(pipeflow explore\b[^`\n]*)`", text)}
    assert len(commands) >= len(SCHEDULES)
    for command in commands:
        link = MADE["link"](command)
        assert link.partition("#")[0] == MADE["FILE"]


@pytest.mark.exhaustive
def test_another_command_leads_there_or_is_refused() -> None:
    link = MADE["link"]("pipeflow explore --link '#schedule=zb-v&latency=0.5'")
    assert link == f"{MADE['FILE']}#{urlencode({'schedule': 'zb-v', 'latency': '0.5'})}"
    with pytest.raises(UsageError, match="does not have this state"):
        MADE["link"]("pipeflow explore zb-v --ranks 5")


def test_the_first_picture_of_the_site_and_commands_that_are_no_links_lead_there() -> None:
    nodes, utils = pytest.importorskip("docutils.nodes"), pytest.importorskip("docutils.utils")
    page, linked = utils.new_document("index"), nodes.reference("", "", refuri="explore.html")
    linked += nodes.literal("", "pipeflow explore")
    page += [nodes.image(uri="flow.svg"), nodes.literal("", "pipeflow explore zb-v"), linked]
    _link_to_explorer = runpy.run_path(str(DOCS / "conf.py"))["_link_to_explorer"]
    _link_to_explorer(SimpleNamespace(env=SimpleNamespace(docname="index")), page)
    addresses = [each["refuri"] for each in page.findall(nodes.reference)]
    assert addresses == [MADE["link"](f"pipeflow explore {each}") for each in ("1f1b zb-v", "zb-v")] + ["explore.html"]
