"""Nobody is kept out: names, contrast, structure and room, in light and dark and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from pipeflow.tools.explore.tour import STEPS
from tests.browser import MARKS
from tests.covering import some_rows
from tests.explore.explorer import Explorer

pytestmark = MARKS

LIBRARY = """
const shown = {opacityProperty: true, visibilityProperty: true};
const seen = (each) => each.checkVisibility(shown) && !each.closest(".unseen, #skip");
const room = document.documentElement.clientWidth;
const all = (selector) => [...document.querySelectorAll(selector)];
const said = (each) => each.outerHTML.slice(0, 90);
const CONTROLS = "button, select, summary, textarea, input, a[href], canvas[tabindex], [role=button]";
const dot = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
const pen = dot.getContext("2d", {willReadFrequently: true});
const rgba = (colour) => {
  pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data];
};
const light = (colour) => {
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = colour.map((part) => linear(part / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const mixed = (under, colour) => under.map((part, at) => part + (colour[at] - part) * colour[3] / 255);
const ground = (each) => {
  const over = [];
  for (let one = each; one; one = one.parentElement) {
    over.push(rgba(getComputedStyle(one).backgroundColor));
    if (over.at(-1)[3] === 255) break;
  }
  return over.reduceRight(mixed, [255, 255, 255]);
};
const contrast = (colour, under) => {
  const [one, other] = [light(under), light(mixed(under, colour))];
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
};
"""
CHECKS = {
    "a control without a name": """
        all(CONTROLS).filter((each) => seen(each) && each.type !== "file" && !(each.ariaLabel || each.labels?.length
          || each.textContent.trim())).map(said)""",
    "too little contrast": """
        all("body *").filter((each) => seen(each) && !each.disabled && !each.closest("option, canvas, script, title")
          && [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim())).map((each) => {
          const colour = rgba(getComputedStyle(each)[each.closest("svg") ? "fill" : "color"]);
          return [contrast(colour, ground(each)), each];
        }).filter(([ratio]) => ratio < 4.5).map(([ratio, each]) => `${ratio.toFixed(2)} ${said(each)}`)""",
    "too little contrast of a placeholder": """
        all("input[placeholder]").filter(seen).map((each) => {
          return [contrast(rgba(getComputedStyle(each, "::placeholder").color), ground(each)), each];
        }).filter(([ratio]) => ratio < 4.5).map(([ratio, each]) => `${ratio.toFixed(2)} ${said(each)}`)""",
    "no landmark, or two": """
        ["header.bar", "main", "form[aria-label]"].filter((each) => all(each).length !== 1)""",
    "headings out of order": """
        all("h1, h2, h3, h4").filter((each) => each.checkVisibility() && each.textContent)
          .map((each) => Number(each.tagName[1]))
          .filter((level, at, levels) => level > (levels[at - 1] ?? 0) + 1 || (level === 1) !== (at === 0))""",
    "no language, or no title": """[document.documentElement.lang, document.title].filter((each) => !each)""",
    "an id twice": """
        all("[id]").map(({id}) => id).filter((id, at, ids) => ids.indexOf(id) !== at)""",
    "a reference to nothing": """
        ["aria-describedby", "aria-labelledby", "aria-controls", "for"].flatMap((name) =>
          all(`[${name}]`).flatMap((each) => each.getAttribute(name).split(" ")))
          .filter((id) => !document.getElementById(id))""",
    "a table without titles of its columns": """
        all("table").filter((each) => !each.caption || !each.querySelector("thead th[scope=col]")).map(said)""",
    "what goes beyond the page": """
        [document.documentElement.scrollWidth].filter((width) => width > room)""",
    "too small for a finger": """
        all(CONTROLS).filter((each) => room < 500 && seen(each) && !each.closest("svg")).map((each) => {
          const {width, height} = each.getBoundingClientRect();
          return [Math.min(width, height), each];
        }).filter(([size]) => size < 24).map(([size, each]) => `${size} ${said(each)}`)""",
    "what moves": """
        all("body *").filter((each) => {
          const {animationName, transitionDuration, scrollBehavior} = getComputedStyle(each);
          return animationName !== "none" || transitionDuration !== "0s" || scrollBehavior === "smooth";
        }).map(said)""",
}
ROWS = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B1 2B0 2F1 2F2 2B2 2F3 2B3"
STATES = {
    "tour": {"tour": "2", **STEPS[1].goal},
    "side by side": {"schedule": "1f1b,interleaved-1f1b:chunks=4", "memory_cap": "2", "from": "3", "to": "9"},
    "model": {"schedule": "zb-v", "model": "gpt3-175b", "ranks": "8", "tensor": "8", "microbatches": "16"},
    "edit": {"schedule": "custom", "rows": ROWS, "placement": "0.1.2", "edit": "1"},
}
LOOKS = {"light": (1180, False), "dark": (1180, True), "phone": (390, False), "dark phone": (390, True)}
SEEN = [("light", "tour"), ("dark phone", "tour"), ("light", "model"), ("dark phone", "model")]
SEEN += [("dark", "side by side"), ("phone", "side by side"), ("dark", "edit"), ("phone", "edit")]
"""Each state in both widths, and in light and dark."""


@pytest.fixture
def look(explorer: Explorer, request: pytest.FixtureRequest) -> Iterator[Explorer]:
    width, dark = LOOKS[request.param]
    names = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in names.items()]
    explorer.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size: dict[str, Any] = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    explorer.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield explorer
    explorer.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    explorer.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


UNFOLD = """
document.querySelectorAll("#export, #window, #words, #controls details").forEach((each) => { each.open = true; });
"""


def faults(explorer: Explorer) -> dict[str, list[str]]:
    """What is wrong with the page as it is now, by the checks that found it."""
    found = {
        name: explorer.browser.execute_script(f"{LIBRARY} return {check.strip()}") for name, check in CHECKS.items()
    }
    return {name: faulty for name, faulty in found.items() if faulty}


@pytest.mark.parametrize(("look", "state"), some_rows(product(LOOKS, STATES), SEEN), indirect=["look"])
def test_the_page_has_no_fault(look: Explorer, state: str) -> None:
    look.open(**STATES[state])
    look.browser.execute_script(UNFOLD)
    assert faults(look.settled()) == {}


BROKEN = {
    "a control without a name": "document.querySelector('#open').textContent = ''",
    "too little contrast": "document.querySelector('#charts h2').style.color = '#999'",
    "too little contrast of a placeholder": "document.querySelector('#find').style.setProperty('background', '#777')",
    "no landmark, or two": "document.body.append(document.createElement('main'))",
    "headings out of order": "document.querySelector('h1').remove()",
    "no language, or no title": "document.documentElement.lang = ''",
    "an id twice": "document.querySelector('#charts h2').id = 'path'",
    "a reference to nothing": "document.querySelector('.lanes').setAttribute('aria-describedby', 'nothing')",
    "a table without titles of its columns": "document.querySelector('caption').remove()",
    "what goes beyond the page": "document.querySelector('#charts').style.width = '2000px'",
    "too small for a finger": "document.querySelector('#open').style.height = '20px'",
    "what moves": "document.querySelector('#open').style.transition = 'all 1s'",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("look", ["phone"], indirect=True)
def test_each_check_sees_what_it_is_for(look: Explorer) -> None:
    assert BROKEN.keys() == CHECKS.keys()
    for name, script in BROKEN.items():
        look.open(ranks=2, microbatches=2).browser.execute_script(script)
        assert name in faults(look), name
