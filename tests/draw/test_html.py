from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import pipeflow
from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.idle_time import causes, critical_path
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.draw import html
from pipeflow.draw.page.timeline_page import EXPORT, IMPORT
from tests.draw.samples import HOSTILE, SAMPLES, measured, paired, planned, reducing, with_bytes, with_transfers

PAGE = Path(pipeflow.__file__).parent / "draw" / "page"
VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """The elements of a page, the texts in them, and whether all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.opened.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened:
            self.texts[self.opened[-1]][-1] += data

    def scripts(self) -> tuple[Any, str]:
        """The data and the program."""
        data, program = self.texts["script"]
        return json.loads(data), program


@pytest.mark.some(6)
@pytest.mark.parametrize("timeline", SAMPLES.values(), ids=SAMPLES)
def test_the_page_holds_every_action_with_its_times(timeline: Timeline) -> None:
    data, _ = Page(html(timeline)).scripts()
    (written,) = data["timelines"]
    for row, spans in zip(written["rows"], timeline.rows, strict=True):
        assert row["actions"].split() == [str(span.action) for span in spans]
        times = [time for span in spans for time in (span.start, span.end)]
        assert row["times"] == pytest.approx(times, rel=1e-8)


@pytest.mark.parametrize(
    "timeline", [planned(), with_transfers(), measured(), paired(), reducing(), reducing("chimera", 3)]
)
def test_the_page_knows_why_everything_began(timeline: Timeline) -> None:
    """What is not said of a block: that it came after the one before it on its stream."""
    data = Page(html(timeline)).scripts()[0]
    rows = data["timelines"][0]["rows"]
    for row, spans, whys in zip(rows, timeline.rows, causes(timeline), strict=True):
        said = {index: cause for index, *cause in row["causes"]}
        before: dict[Stream, Action] = {}
        for index, (span, why) in enumerate(zip(spans, whys, strict=True)):
            place, value = said.get(index, [])[:2], said.get(index, [])[2:]
            after = before.get(span.stream) if index not in said else None
            if place:
                after = Action.parse(rows[place[0]]["actions"].split()[place[1]])
            assert after == (why.after and why.after.action)
            assert value == ([data["contents"].index(why.value[0]), *why.value[1:3]] if why.value else [])
            before[span.stream] = span.action


@pytest.mark.parametrize("timeline", [with_transfers(), reducing(), reducing("chimera")])
def test_the_page_holds_the_critical_path(timeline: Timeline) -> None:
    written = Page(html(timeline)).scripts()[0]["timelines"][0]
    path = [written["rows"][rank]["actions"].split()[index] for rank, index in written["path"]]
    assert path == [str(cause.span.action) for cause in critical_path(timeline)]


@pytest.mark.parametrize("timeline", [planned(), with_bytes(), measured(), reducing()])
def test_the_page_holds_what_every_rank_keeps_and_how_that_is_written(timeline: Timeline) -> None:
    written = Page(html(timeline)).scripts()[0]["timelines"][0]
    for rank, row in enumerate(written["rows"]):
        curve = [(time, written["levels"][level][0]) for time, level in row["memory"]]
        assert curve == [(pytest.approx(time), pytest.approx(amount)) for time, amount in timeline.memory(rank)]
    assert written["levels"][0] == [0, "0 B" if timeline.saved_bytes else "0 activations"]


def test_a_kind_of_action_is_described_by_the_table_alone() -> None:
    kinds = Page(html(planned())).scripts()[0]["kinds"]
    assert list(kinds) == [kind.value for kind in Kind]
    assert {letter for letter, kind in kinds.items() if kind["passes"]} == {"F", "B", "I"}
    assert {letter for letter, kind in kinds.items() if not kind["single"]} == {"R", "S", "U", "H"}
    assert kinds["W"]["name"] == "weight gradient"
    assert kinds["R"]["stream"] == "reductions"
    assert [kinds[letter]["counts"] for letter in "FRU"] == ["microbatch", "last microbatch", "number"]


def test_streams_are_lanes_with_names() -> None:
    written = Page(html(reducing())).scripts()[0]["timelines"][0]
    assert written["streams"] == ["computations", "reductions"]
    assert [row["names"] for row in written["rows"]] == [[f"rank {rank}", "reductions"] for rank in range(4)]
    assert Page(html(planned())).scripts()[0]["timelines"][0]["streams"] == ["computations"]


def test_every_import_of_a_module_is_an_export_of_another() -> None:
    modules = {path.stem: path.read_text(encoding="utf-8") for path in PAGE.glob("*.js")}
    exports = {name: set(EXPORT.findall(text)) for name, text in modules.items()}
    for text in modules.values():
        for names, module in IMPORT.findall(text):
            assert set(names.split(", ")) <= exports[module]
    assert not re.search(r"^\s*(import|export)\b", Page(html(planned())).scripts()[1], re.MULTILINE)
    assert all(f"modules.{name} = " in Page(html(planned())).scripts()[1] for name in modules)


def test_the_page_loads_nothing_and_runs_its_own_script_alone() -> None:
    page = Page(html(planned()))
    policy = next(attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes) or ""
    program = page.scripts()[1]
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not [attributes for _, attributes in page.elements if {"src", "href"} & set(attributes)]
    assert "http" not in program


@pytest.mark.parametrize("unit", ["ms", HOSTILE])
def test_names_cannot_leave_their_text(unit: str) -> None:
    harmless, hostile = Page(html(planned("1f1b", 2, 3), unit="ms")), Page(html(SAMPLES["hostile"], unit=unit))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert hostile.texts["h2"] == [f"{HOSTILE}, 2 ranks, 3 microbatches"]
    assert hostile.scripts()[0]["unit"] == unit


def test_timelines_stand_above_each_other() -> None:
    page = Page(html([planned(), measured()], unit="ms", factor=1000))
    assert page.texts["h2"] == ["1f1b, 4 ranks, 8 microbatches", "measured: 1f1b, 4 ranks, 6 microbatches"]
    assert sum(attributes.get("class") == "lanes" for _, attributes in page.elements) == 2
    assert len(page.scripts()[0]["timelines"]) == 2


def test_a_table_says_the_measures() -> None:
    text = html([planned(), with_bytes()], unit="s")
    table = text[text.index("<caption><span>Measures") :]
    cells = re.findall(r"<td>([^<]*)</td>", table)
    assert cells[:6] == ["33 s", "33 s", "24 s", "27.3%", "27.3%", "4 activations"]
    assert cells[6:12] == ["27 s", "27 s", "24 s", "11.1%", "11.1%", "12 GiB"]


def test_what_can_be_focused_has_a_name() -> None:
    page = Page(html(paired()))
    lanes = next(attributes for tag, attributes in page.elements if attributes.get("class") == "lanes")
    assert (lanes["aria-label"] or "").startswith("paired, 2 ranks, 4 microbatches: makespan")
    assert lanes["tabindex"] == "0"
    assert all(
        attributes.get("aria-label") or attributes["id"] in ("whole", "forget", "play")
        for tag, attributes in page.elements
        if tag == "button"
    )


def test_the_size_is_bounded() -> None:
    """About twenty letters a block."""
    timeline = planned("zb-h1", 8, 128)
    assert len(html(timeline)) - len(html(planned("zb-h1", 1, 1))) < 24 * sum(map(len, timeline.rows))


def test_there_must_be_something_to_draw() -> None:
    assert html(planned()) == html([planned()])
    with pytest.raises(UsageError, match="at least one timeline"):
        html([])
