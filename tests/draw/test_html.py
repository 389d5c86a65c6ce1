from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from pipeflow.analysis.causes import causes, critical_path
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.draw import html
from tests.draw.samples import HOSTILE, SAMPLES, measured, paired, planned, reducing, with_bytes, with_transfers

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


@pytest.mark.parametrize("timeline", SAMPLES.values(), ids=SAMPLES)
def test_the_page_holds_every_action_with_its_times(timeline: Timeline) -> None:
    data, _ = Page(html(timeline)).scripts()
    (written,) = data["timelines"]
    for row, spans in zip(written["rows"], timeline.on(Stream.COMPUTE), strict=True):
        assert row["actions"].split() == [str(span.action) for span in spans]
        times = [time for span in spans for time in (span.start, span.end)]
        assert row["times"] == pytest.approx(times, rel=1e-8)


@pytest.mark.parametrize("timeline", [planned(), with_transfers(), measured(), paired()])
def test_the_page_knows_what_was_waited_for(timeline: Timeline) -> None:
    data, _ = Page(html(timeline)).scripts()
    rows = data["timelines"][0]["rows"]
    for row, whys in zip(rows, causes(timeline), strict=True):
        waits = {wait[0]: wait[1:] for wait in row["waits"]}
        assert set(waits) == {index for index, cause in enumerate(whys) if cause.value}
        for index, (rank, position, *value) in waits.items():
            cause = whys[index]
            assert cause.after is not None
            assert cause.value is not None
            assert rows[rank]["actions"].split()[position] == str(cause.after.action)
            assert value == [cause.value.content.value, cause.value.stage, cause.value.microbatch]


def named(row: dict[str, Any]) -> list[str]:
    """What a rank runs, and then its reductions: the order in which the page counts them."""
    return [*row["actions"].split(), *row.get("reductions", {"actions": ""})["actions"].split()]


@pytest.mark.parametrize("timeline", [with_transfers(), reducing(), reducing("chimera")])
def test_the_page_holds_the_critical_path(timeline: Timeline) -> None:
    written = Page(html(timeline)).scripts()[0]["timelines"][0]
    path = [named(written["rows"][rank])[index] for rank, index in written["path"]]
    assert path == [str(cause.span.action) for cause in critical_path(timeline)]


@pytest.mark.parametrize("timeline", [reducing(), reducing("chimera", 3)])
def test_the_page_holds_reductions_with_their_times_and_causes(timeline: Timeline) -> None:
    rows = Page(html(timeline)).scripts()[0]["timelines"][0]["rows"]
    for row, spans, every in zip(rows, timeline.on(Stream.REDUCE), causes(timeline), strict=True):
        reductions, whys = row["reductions"], [cause for cause in every if cause.span in spans]
        assert reductions["actions"].split() == [str(span.action) for span in spans]
        assert reductions["times"] == [time for span in spans for time in (span.start, span.end)]
        after = [named(rows[rank])[index] for rank, index in reductions["after"]]
        assert after == [str(cause.after.action) for cause in whys if cause.after]
        assert [wait[0] for wait in reductions["waits"]] == [
            len(row["actions"].split()) + index for index, cause in enumerate(whys) if cause.value
        ]
    assert "reductions" not in Page(html(planned())).scripts()[0]["timelines"][0]["rows"][0]


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
    table = text[text.index("<caption>Measures") :]
    cells = re.findall(r"<td>([^<]*)</td>", table)
    assert cells[:5] == ["33 s", "33 s", "24 s", "27.3%", "4 activations"]
    assert cells[5:10] == ["27 s", "27 s", "24 s", "11.1%", "12 GiB"]


def test_what_can_be_focused_has_a_name() -> None:
    page = Page(html(paired()))
    lanes = next(attributes for tag, attributes in page.elements if attributes.get("class") == "lanes")
    assert (lanes["aria-label"] or "").startswith("paired, 2 ranks, 4 microbatches: makespan")
    assert lanes["tabindex"] == "0"
    assert all(
        attributes.get("aria-label") or attributes["id"] in ("whole", "forget")
        for tag, attributes in page.elements
        if tag == "button"
    )


def test_the_size_is_bounded() -> None:
    """About twenty letters a block."""
    timeline = planned("zb-h1", 16, 256)
    assert len(html(timeline)) - len(html(planned("zb-h1", 1, 1))) < 24 * sum(map(len, timeline.rows))


def test_there_must_be_something_to_draw() -> None:
    assert html(planned()) == html([planned()])
    with pytest.raises(UsageError, match="at least one timeline"):
        html([])
